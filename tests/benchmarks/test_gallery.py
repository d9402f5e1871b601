"""Boxes that other people wrote, with the layer as it is used by default. Each needs its package or its program."""

import functools
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_boxes import BOXES, ForeignBox
from gallery import Course, fixed_layer, run
from references import difference, smoothed

from bondgrad import BlackBox

RESULTS = Path(__file__).parents[2] / "results" / "gallery.json"
COURSE = Course(steps=40, measured=16, every=4, smoothed_every=8)
PACKAGES = {
    "circuit": "pennylane",
    "contacts": "mujoco",
    "tree": "sklearn",
    "forest": "sklearn",
    "boosted": "sklearn",
    "Gaussian": "sklearn",
    "stiff": "scipy",
}
# By how many points the signs of the default layer may be below those of the best fixed step, after COURSE and with one
# seed. For boxes with jumps signs are those of the smoothed box.
MARGINS = {
    "circuit, exact": 0.0,
    "circuit, 1000 shots": 8.0,
    "circuit, 100 shots": 8.0,
    "circuit, inputs of 0.3, 1000 shots": 12.0,
    "circuit, inputs of 0.3, 100 shots": 14.0,
    "circuit, one row, 1000 shots": 50.0,
    "contacts": 30.0,
    "tree": 80.0,
    "forest": 30.0,
    "boosted trees": 30.0,
    "Gaussian process": 0.0,
    "stiff solver": 2.0,
    "circuit simulator": 1.0,
}


@functools.cache
def best_steps():
    return {found["box"]: found["best_step"] for found in json.loads(RESULTS.read_text())["numbers"]}


def made(name):
    if name.split(",")[0].split(" ")[0] in PACKAGES and name != "circuit simulator":
        pytest.importorskip(PACKAGES[name.split(",")[0].split(" ")[0]])
    try:
        return BOXES[name]()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_every_box_has_a_margin_and_a_best_step():
    assert list(MARGINS) == list(BOXES) == list(best_steps())


@pytest.mark.parametrize("name", BOXES)
def test_the_default_layer_is_about_as_good_as_the_best_fixed_step(name):
    box = made(name)
    reference = "smoothed" if box.jumps else "slope"
    layers = {
        "default": BlackBox(box.answers, box.d, box.d_out, seed=0),
        "fixed": fixed_layer(box, best_steps()[name][reference]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what the layer says of a box is tested elsewhere
        found = run(box, 0, layers, COURSE)[reference]
    assert found["default"][0] >= found["fixed"][0] - MARGINS[name] - 1e-9, found


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
