"""The search for structure in a training step: when it comes, and what it is told of rounding and noise."""

import pytest
import torch

from bondgrad import BlackBox
from bondgrad.step._backward import search_structure
from bondgrad.step._neighbourhood import Neighbourhood
from bondgrad.step._records import ForwardRecord
from tests.step.test_backward import step_of

SINGLE, DOUBLE = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64))


class Tracker:
    """Stands in for the layer's tracker, and returns what a search would work with."""

    def due(self, time):
        return time == 1

    def search(self, batch):
        return batch


def searched(fn, x, training=True, **changes):
    step = step_of(BlackBox(fn, 3), x, torch.ones(4, 3), ForwardRecord(training))
    step = step._replace(tracker=Tracker(), **changes)
    return search_structure(step, Neighbourhood(step.parts, step.x, step.y))


@pytest.mark.parametrize(
    ("given", "answered", "rounding", "noise"),
    [
        (torch.float32, torch.float32, SINGLE, SINGLE),
        (torch.float64, torch.float32, SINGLE, SINGLE),
        (torch.float32, torch.float64, DOUBLE, SINGLE),
        (torch.float64, torch.int64, DOUBLE, DOUBLE),  # whole numbers are exact, and compared with what x can tell
    ],
)
def test_a_search_knows_the_rounding_of_the_answers(given, answered, rounding, noise):
    batch = searched(lambda x: x.to(answered), torch.ones(4, 3, dtype=given))
    assert (batch.rounding, batch.noise) == (rounding, noise)
    assert (batch.features, batch.whole) == (3, False)


def test_a_search_comes_in_training_outside_of_captures_when_the_tracker_says_so():
    x = torch.ones(4, 3)
    assert searched(torch.sin, x) is not None
    assert searched(torch.sin, x, training=False) is None
    assert searched(torch.sin, x, capturing=True) is None
