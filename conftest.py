"""Every test, and every example in a docstring, starts from the same random numbers."""

from typing import Any

import pytest
import torch

import bondgrad


@pytest.fixture(autouse=True)
def _seeded(doctest_namespace: dict[str, Any]) -> None:
    torch.manual_seed(0)
    doctest_namespace |= {"torch": torch, "nn": torch.nn, "bondgrad": bondgrad}
