"""Is this gradient right?"""

from bondgrad.checking._check import Check, check

__all__ = ["Check", "check"]
