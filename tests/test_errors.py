"""Checks of arguments: what is taken, what is refused, and what is said about it."""

import math

import numpy as np
import pytest
import torch

from bondgrad.errors import checked_noise, checked_seed, chosen, not_negative, positive_float, positive_int


@pytest.mark.parametrize("value", [1, np.int64(1), torch.tensor(1)])
def test_whole_numbers_of_every_library(value):
    assert positive_int("n", value) == 1
    assert type(positive_int("n", value)) is int


@pytest.mark.parametrize("value", [0, -1, 1.0, "1", None, True])
def test_what_is_no_positive_integer(value):
    with pytest.raises(ValueError, match="n must be a positive integer, got"):
        positive_int("n", value)


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1])
def test_seeds(value):
    assert checked_seed(value) == value


@pytest.mark.parametrize("value", [-1, 2**63, 0.5, False, "0"])
def test_what_is_no_seed(value):
    with pytest.raises(ValueError, match="seed must be an integer from 0"):
        checked_seed(value)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), torch.tensor(0.5)])
def test_numbers_of_every_library(value):
    assert positive_float("h", value) == not_negative("h", value) == 0.5
    assert type(positive_float("h", value)) is float


@pytest.mark.parametrize("value", [-1e-300, math.inf, math.nan, "1", True, None, 10**400, [1, 2]])
def test_what_is_no_finite_number(value):
    with pytest.raises(ValueError, match="h must be a positive finite number, got"):
        positive_float("h", value)
    with pytest.raises(ValueError, match="h must be zero or a positive finite number, got"):
        not_negative("h", value)


def test_zero_is_not_positive():
    assert not_negative("h", 0) == 0
    with pytest.raises(ValueError, match="positive"):
        positive_float("h", 0)


def test_noise_is_a_number_or_auto_or_none():
    assert [checked_noise(value) for value in (None, "auto", 1)] == [None, "auto", 1.0]
    for value in ("none", 0, -1):
        with pytest.raises(ValueError, match=r"noise must be .* \(None and 'auto' are possible, too\)"):
            checked_noise(value)


def test_an_instance_or_its_name():
    by_name = {"zero": int, "nothing": list}
    assert chosen("what", "zero", by_name, int) == 0
    assert chosen("what", 3, by_name, int) == 3
    for value in ("three", None):
        with pytest.raises(ValueError, match="what must be one of 'zero', 'nothing' or an instance of int, got"):
            chosen("what", value, by_name, int)
