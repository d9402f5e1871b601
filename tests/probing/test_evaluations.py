"""How many evaluations every measurement of a probe makes: what is asked, counted by hand."""

import numpy as np
import pytest
import torch

from bondgrad.probing import Session
from tests.probing.test_probe import rows

FIRST = 1 + 8 + 1 + 200  # one row, eight in a call, one again, and the typical rows
LOOK = 4  # rows before every measurement, to see drift
REPEATS = 16 * (1 + 16) + 16 * 16  # rows once, again and again in calls of their own, and together in one
CALLS = 3 * (1 + 8 + 64 + 512)  # of every size that a tenth of the budget reaches for
MEMORY = 2 * 2 * (4 + 4)  # there and back: four rows after themselves, and after others
SHORTCUT = 2 * 2 * 8  # there and back: eight rows in full precision, and as set
TOGETHER = 2 * 3 * (4 + 12)  # there and back: four rows among twelve others, in three ways
PLAIN = {
    "The same again": REPEATS,
    "Speed": CALLS,
    "Memory": MEMORY,
    "Failures": 0,  # nothing fails at random
    "Steps": 32 * 2 * 13,  # slopes at both ends of 13 steps
    "Rounding": 32 + 6 * 4 * 16 + SHORTCUT,  # points between rows; lines of four spacings
    "Rows together": TOGETHER,
    "Smoothness": 6 * 17 * 5,  # points of lines, and four zooms
    "Ranges": 4 * 2 * 17,  # inputs at two rows
    "Structure": 8 * (16 + 4),  # rows repeated, and inputs moved
    "Inputs": 4 * 4 * 2,  # rows, inputs, both ends
    "Drift": 0,
}


def evaluations(fn, x, **options):
    """Those of every measurement, without the look before it."""
    session = Session(fn, x, seconds=1e9, **options)
    names, made = [], []
    for name in session.run():
        names.append(name)
        made.append(session.sampler.evaluations)
    made.append(session.report().evaluations)
    assert (names[0], made[1] - made[0]) == ("First questions", FIRST)
    assert names[3] == names[13] == "History"
    names[3], names[13] = "Memory", "Drift"
    found = {name: after - before - LOOK for name, before, after in zip(names[1:], made[1:], made[2:], strict=False)}
    assert found.pop("Gradients") <= 20_000 - sum(found.values())  # those of a training, as much as is left
    return found


def test_of_a_smooth_function():
    assert evaluations(torch.sin, rows()) == PLAIN


def test_of_a_smooth_function_in_double_precision():
    finer = {"Rounding": 32 + 6 * 8 * 16 + SHORTCUT, "Steps": 32 * 2 * 25}
    assert evaluations(torch.sin, rows(dtype=torch.float64)) == PLAIN | finer


def test_of_a_noisy_box():
    numbers = np.random.default_rng(0)

    def fn(x):
        return torch.sin(x) + 1e-2 * torch.from_numpy(numbers.normal(size=x.shape)).float()

    noisy = {
        "The same again": REPEATS + 3 * 2 * 4 * 16,  # three generators are reset, between calls of the noisiest rows
        "Memory": 4 * MEMORY,
        "Rounding": 32,  # beneath noise, none is seen
        "Rows together": 4 * TOGETHER,
        "Smoothness": 6 * (17 + 3) * 5,  # the largest bend once more
        "Structure": 8 * (16 + 2 * 4),  # each moved row beside itself
    }
    assert evaluations(fn, rows()) == PLAIN | noisy


def test_of_a_box_that_remembers():
    """It is asked about the same eight rows before all that is compared, and before every look."""
    before = torch.zeros(4)

    def fn(x):
        nonlocal before
        y = torch.sin(x) + 0.1 * before
        before = x.mean(0)
        return y

    found = evaluations(fn, rows())
    extra = {name: n - PLAIN[name] for name, n in found.items()}
    assert extra["Rounding"] == 8 + 2 * 2 * 8
    assert extra["Rows together"] == 8 + 2 * 3 * 8
    assert {extra[name] for name in ("Steps", "Smoothness", "Ranges", "Inputs", "Drift")} == {8}


def test_of_noise_that_is_repeated_by_a_seed():
    """Four checks with torch's generator reset, four without; two calls with the same seed."""

    def fn(x, seed=None):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return torch.sin(x) + 0.01 * torch.randn(x.shape, generator=generator)

    assert evaluations(fn, rows())["The same again"] == REPEATS + 2 * 4 + 2 * (4 + 4) * 4 * 16


@pytest.mark.parametrize(
    ("budget", "typical", "count", "repeats"), [(700, 69, 6, 16), (300, 29, 2, 12), (100, 9, 1, 3), (30, 2, 1, 3)]
)
def test_of_repeats_within_a_small_budget(budget, typical, count, repeats):
    """A tenth goes to typical rows; a hundredth of what is left makes rows, and a twentieth repeats."""
    session = Session(torch.sin, rows(), budget=budget, seconds=1e9)
    made = []
    for name in session.run():
        made.append(session.sampler.evaluations)
        if name == "Speed":
            break
    look = min(LOOK, typical)
    assert made[1:] == [10 + typical, 10 + typical + look + count * (1 + 2 * repeats)]


def test_no_more_than_256_typical_rows():
    session = Session(torch.sin, rows(300), seconds=1e9)
    run = session.run()
    assert next(run) == "First questions"
    assert next(run) == "The same again"
    assert session.sampler.evaluations == 10 + 256


@pytest.mark.parametrize(("d", "points"), [(60, 17), (200, 9), (500, 5)])
def test_inputs_are_swept_at_fewer_points_where_there_are_many(d, points):
    """Two rows, within three tenths of what is left: nearly 15,000 evaluations."""
    found = evaluations(lambda x: x.mean(1, keepdim=True), rows(d=d))
    left = 20_000 - FIRST - sum(found[name] + LOOK for name in list(PLAIN)[:8]) - LOOK
    assert found["Ranges"] == 2 * points * min(d, int(0.3 * left) // (2 * points))
