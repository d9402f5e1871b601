"""Networks of the paper's experiments."""

from bondgrad.networks._ffnn import ffnn

__all__ = ["ffnn"]
