"""What times of calls say."""

import pytest
import torch

from bondgrad import probe
from bondgrad.evaluators import Local
from bondgrad.probing._speed import Speed
from tests.probing.test_probe import rows


def speed(batches, max_rows=None):
    return Speed(batches[min(batches)], batches, max_rows)


@pytest.mark.parametrize(
    ("batches", "max_rows", "vectorised"),
    [
        ({1: 1.0, 8: 1.0, 64: 1.0}, None, True),
        ({1: 1.0, 8: 1.0, 64: 5.5}, None, True),  # eight times the rows in less than 0.7 of eight times the time
        ({1: 1.0, 8: 8.0, 64: 44.7}, None, True),
        ({1: 1.0, 8: 8.0, 64: 45.0}, None, False),
        ({1: 1.0, 8: 8.0, 64: 64.0}, None, False),
        ({1: 1.0, 8: 2.0, 64: 16.0}, None, None),  # four times faster a row, but in large calls time grows
        ({1: 1.0, 8: 3.0, 64: 24.0}, None, False),
        ({1: 1.0, 8: 2.6, 64: 21.0}, None, None),  # three times faster, and a little
        ({1: 3.0, 8: 8.0, 64: 64.0}, None, None),
        ({1: 1.0}, None, None),
        ({8: 1.0}, None, None),
        ({1: 1.0, 4: 1.0}, None, None),
        ({1: 1.0, 8: 1.0}, None, True),
        ({1: 1.0, 8: 1.0}, 1, False),
    ],
)
def test_vectorised(batches, max_rows, vectorised):
    assert speed(batches, max_rows).vectorised is vectorised


def test_seconds_between_and_beyond_what_was_timed():
    known = speed({1: 1.0, 9: 3.0, 19: 13.0})
    assert [known.seconds(n) for n in (1, 5, 9, 14, 19, 29)] == [1.0, 2.0, 3.0, 8.0, 13.0, 23.0]
    assert speed({4: 2.0}).seconds(6) == 3.0
    assert speed({1: 2.0, 9: 1.0}).seconds(5) == 2.0  # more rows never take less


def test_seconds_in_several_calls():
    known = speed({1: 1.0, 9: 3.0}, max_rows=9)
    assert known.seconds(18) == 6.0
    assert known.seconds(19) == 7.0
    assert known.seconds(23) == 8.0


def test_extrapolated():
    assert [speed({1: 1.0, 8: 1.0}).extrapolated(n) for n in (7, 8, 9)] == [False, False, True]
    assert not speed({1: 1.0, 8: 1.0}, max_rows=8).extrapolated(100)
    assert speed({1: 1.0, 8: 1.0}, max_rows=9).extrapolated(100)


@pytest.mark.parametrize(
    ("batches", "max_rows", "words"),
    [
        ({1: 2.0}, None, "One row takes 2.0 s."),
        ({1: 2.0}, 1, "One row takes 2.0 s. It takes one row at a time: a call with two failed."),
        ({2: 2.0}, None, "It does not take one row alone; 2 take 2.0 s, 2 at once 2.0 s (1 rows a second)."),
        ({1: 2.0, 4: 2.0}, None, "One row takes 2.0 s, 4 at once 2.0 s (2 rows a second)."),
        ({1: 2.0, 8: 2.0}, None, "One row takes 2.0 s, 8 at once 2.0 s (4 rows a second): vectorised."),
        (
            {1: 2.0, 8: 16.0},
            20,
            "One row takes 2.0 s, 8 at once 16 s (0 rows a second): not vectorised, the time grows with the rows. It "
            "takes no more than about 20 rows in a call: a larger one failed.",
        ),
        (
            {1: 1.0, 8: 2.0, 64: 16.0},
            None,
            "One row takes 1.0 s, 64 at once 16 s (4 rows a second): large calls help, but in them the time grows with "
            "the rows.",
        ),
    ],
)
def test_words(batches, max_rows, words):
    assert speed(batches, max_rows).words == words


def test_calls_as_large_as_an_evaluator_takes_are_timed():
    """They predict the others, when no size of the list is allowed beside a single row."""
    assert 3 in probe(torch.sin, rows(), evaluator=Local(max_rows=3)).speed.batches
