"""Boxes that other people wrote, with the layer as it is used by default. Each needs its package or its program."""

import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
from foreign_boxes import BOXES, ForeignBox
from gallery import Course, fixed_layer, run
from references import difference, smoothed

from bondgrad import BlackBox

COURSE = Course(steps=40, measured=16, every=4, smoothed_every=8)
SHORT = Course(steps=24, measured=8, every=4, smoothed_every=8)  # where a row takes a millisecond
PACKAGES = {
    "circuit": "pennylane",
    "contacts": "mujoco",
    "tree": "sklearn",
    "forest": "sklearn",
    "boosted": "sklearn",
    "Gaussian": "sklearn",
    "stiff": "scipy",
}


class Goal(NamedTuple):
    """What the default layer is compared with, for seed 0."""

    step: float  # the best fixed step at another seed, in deviations of the inputs
    signs: float  # points by which signs may be worse than with that step
    cosine: float  # by how much the cosine may be
    course: Course = COURSE


# For boxes with jumps the reference is the smoothed slope, of which no step is right by definition.
GOALS = {
    "circuit, exact": Goal(0.125, 0.0, 1e-6),
    "circuit, 1000 shots": Goal(1.4, 3.0, 0.02),
    "circuit, 100 shots": Goal(1.4, 3.0, 0.04),
    "circuit, inputs of 0.3, 1000 shots": Goal(2.8, 3.0, 0.02),
    "circuit, inputs of 0.3, 100 shots": Goal(2.8, 4.0, 0.04),
    "circuit, one row, 1000 shots": Goal(8.0, 8.0, 0.1),
    "contacts": Goal(1.0, 8.0, 0.1, SHORT),
    "tree": Goal(2.8, 30.0, 0.1),
    "forest": Goal(2.8, 6.0, 0.04),
    "boosted trees": Goal(2.0, 5.0, 0.03),
    "Gaussian process": Goal(2**-10, 0.0, 1e-6),
    "stiff solver": Goal(0.125, 2.0, 0.01),
    "circuit simulator": Goal(2**-10, 0.0, 1e-6),
}


def made(name):
    if name != "circuit simulator":  # a program
        pytest.importorskip(PACKAGES[name.replace(",", "").split()[0]])
    try:
        return BOXES[name]()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_every_box_has_a_goal():
    assert list(GOALS) == list(BOXES)


@pytest.mark.parametrize("name", BOXES)
def test_the_default_layer_is_about_as_good_as_the_best_fixed_step(name):
    box, goal = made(name), GOALS[name]
    reference = "smoothed" if box.jumps else "slope"
    layers = {"default": BlackBox(box.answers, box.d, box.d_out, seed=0), "fixed": fixed_layer(box, goal.step)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what the layer says of a box is tested elsewhere
        found = run(box, 0, layers, goal.course)[reference]
    (signs, cosine), (fixed_signs, fixed_cosine) = found["default"], found["fixed"]
    assert signs >= fixed_signs - goal.signs - 1e-6, found
    assert cosine >= fixed_cosine - goal.cosine, found


def test_smoothed_slopes_are_those_of_a_smoothed_sine():
    box = ForeignBox(lambda x: np.sin(2 * x).sum(1, keepdims=True), 2, 1, 0.5, jumps=True)
    x = torch.tensor([[0.3, -0.2]])
    # The mean of sin(2 (x + s z)) over z is sin(2 x) exp(-2 s²).
    exact = 2 * torch.cos(2 * x.double()) * np.exp(-0.5)
    torch.testing.assert_close(smoothed(box, x, torch.ones(1, 1), centres=4000), exact, rtol=0.02, atol=0)


def test_a_smoothed_slope_that_is_not_certain_counts_as_none():
    random = np.random.default_rng(0)
    box = ForeignBox(lambda x: random.normal(size=(len(x), 1)) + 3 * x[:, :1], 2, 1, 1.0, jumps=True)
    known = smoothed(box, torch.zeros(200, 2), torch.ones(200, 1)) != 0
    assert known[:, 0].all()
    assert known[:, 1].double().mean() < 0.1


def test_slopes_of_a_smooth_box_are_those_without_its_noise():
    random = np.random.default_rng(0)
    box = ForeignBox(lambda x: x**2 + random.normal(size=x.shape), 3, 3, 1.0, smooth=lambda x: x**2)
    x, gy = torch.randn(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(difference(box, x, gy), (2 * x * gy).double(), rtol=1e-6, atol=1e-6)
