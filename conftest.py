"""Every test, and every example in a docstring, starts from the same random numbers."""

import signal
from typing import Any

import pytest
import torch

import bondgrad

# A shell starts its background jobs with Ctrl-C ignored; the tests that press it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded(doctest_namespace: dict[str, Any]) -> None:
    torch.manual_seed(0)
    doctest_namespace |= {"torch": torch, "nn": torch.nn, "bondgrad": bondgrad}
