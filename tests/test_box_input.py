"""Whatever comes in: a clear error or a finite result, and never a changed state."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from bondgrad import BlackBox, BoxError, Simultaneous
from bondgrad.evaluators import Local
from bondgrad.policies import Bond, Fixed, Gaussian, Optimal
from bondgrad.structure import Blocks
from tests.helpers import gradient, root, same_state

# ---- arguments of the layer


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"fn": 3}, TypeError, "fn must be callable"),
        ({"in_features": 0}, ValueError, "in_features must be a positive integer"),
        ({"in_features": 2.5}, ValueError, "in_features"),
        ({"out_features": -1}, ValueError, "out_features"),
        ({"estimator": "backward"}, ValueError, "estimator must be one of 'central', 'forward', 'simultaneous'"),
        ({"policy": "best"}, ValueError, "policy must be one of 'bond', 'calibrated'"),
        ({"policy": Bond}, ValueError, "an instance of Policy"),
        ({"noise": -1.0}, ValueError, "noise must be a positive finite number"),
        ({"noise": math.nan}, ValueError, "noise"),
        ({"noise": "some"}, ValueError, "noise must be a positive finite number, got 'some' .None and 'auto'"),
        ({"limits": (1.0, 0.0)}, ValueError, "low < high"),
        ({"limits": (0.0, math.nan)}, ValueError, "low < high"),
        ({"limits": 3.0}, ValueError, "pair"),
        ({"limits": ([0.0, 0.0], 1.0)}, ValueError, "3 numbers"),
        ({"limits": ("a", "b")}, ValueError, "numbers"),
        ({"structure": "sparse"}, ValueError, "structure must be"),
        ({"structure": np.ones((3, 4), bool)}, ValueError, r"\[out_features, in_features\] = \[..., 3\], got \[3, 4\]"),
        ({"structure": np.ones((3, 3))}, ValueError, "structure must be"),
        ({"structure": torch.ones(3, dtype=torch.bool)}, ValueError, "structure must be"),
        ({"structure": Blocks(2, 1)}, ValueError, "whole number of blocks"),
        ({"structure": Blocks(1, 2), "out_features": 5}, ValueError, "whole number of blocks"),
        ({"structure": 3}, ValueError, "structure must be"),
        ({"noise": 10**400}, ValueError, "noise"),
        ({"state": 0}, ValueError, "tensors or arrays"),
        ({"state": torch.tensor(0.0)}, ValueError, "one entry per row first"),
        ({"state": "memory"}, ValueError, "tensors or arrays"),
        ({"state": ()}, ValueError, "one entry per row first"),
        ({"eager": True, "state": torch.zeros(1, 3)}, ValueError, "eager must be False here, since a box with memory"),
        (
            {"eager": True, "fn": lambda x, seed: x},
            ValueError,
            "eager must be False here, since a box that takes a seed",
        ),
        ({"in_features": True}, ValueError, "in_features"),
        ({"noise": True}, ValueError, "noise"),
        ({"seed": 1.5}, ValueError, "seed must be an integer"),
        ({"seed": 2**64}, ValueError, "seed"),
        ({"evaluator": Local}, ValueError, "evaluator must be an instance"),
        ({"on_failure": "ignore"}, ValueError, "'degrade' or 'raise'"),
    ],
)
def test_constructor(arguments, error, says):
    with pytest.raises(error, match=says):
        BlackBox(**({"fn": torch.sin, "in_features": 3} | arguments))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Bond("adagrad"),
        lambda: Bond(reduce="median"),
        lambda: Bond(betas=(0.9, 1.0)),
        lambda: Bond(betas=0.9),
        lambda: Bond(max_step="a"),
        lambda: Bond(eta=0),
        lambda: Bond(max_step=0),
        lambda: Bond(max_step=math.nan),
        lambda: Fixed(0),
        lambda: Fixed(math.inf),
        lambda: Gaussian(-1),
        lambda: Optimal(0, 1),
        lambda: Optimal(1, 0),
        lambda: Simultaneous(0),
        lambda: Simultaneous(1.5),
        lambda: Local(max_rows=1.5),
        lambda: Local(max_rows=0),
        lambda: Local(memory=0),
    ],
)
def test_parts(make):
    with pytest.raises(ValueError, match="must be"):
        make()


def test_a_refused_module_is_left_as_it_was():
    module = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="estimator"):
        BlackBox(module, 3, estimator="backward")
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


def test_numbers_of_numpy_are_numbers():
    layer = BlackBox(torch.sin, np.int64(3), noise=np.float32(1e-3), policy=Bond(betas=[0.9, 0.99]))
    gradient(layer, torch.randn(4, 3), torch.ones(4, 3))


# ---- inputs


@pytest.mark.parametrize(
    ("x", "error", "says"),
    [
        (torch.zeros(4, 5), ValueError, r"in_features=3\], got \[4, 5\]"),
        (torch.zeros(()), ValueError, "in_features=3"),
        (torch.zeros(0, 3), ValueError, "empty batch"),
        (torch.zeros(4, 0, 3), ValueError, "empty batch"),
        (torch.zeros(4, 3, dtype=torch.int64), TypeError, r"floating point, got torch.int64, .* call x.float\(\)"),
        (torch.zeros(4, 3, dtype=torch.bool), TypeError, "floating point"),
        (torch.zeros(4, 3, dtype=torch.complex64), TypeError, "floating point"),
        (np.zeros((4, 3)), TypeError, "torch tensor, got ndarray"),
        (torch.zeros(4, 3).to_sparse(), TypeError, "dense"),
        (None, TypeError, "torch tensor"),
    ],
)
def test_x(x, error, says):
    layer = BlackBox(torch.sin, 3)
    with pytest.raises(error, match=says):
        layer(x)
    assert layer.stats.calls == 0


def test_context():
    layer = BlackBox(lambda x, c: x, 3)
    with pytest.raises(ValueError, match=r"context 0 must have one entry per row of x, shape \[4, ...\], got \[5, 3\]"):
        layer(torch.zeros(4, 3), torch.zeros(5, 3))
    with pytest.raises(TypeError, match="context 0 must be a torch tensor"):
        layer(torch.zeros(4, 3), 3.0)


# ---- functions

BROKEN = {
    "raises": (lambda x: 1 / 0, "raised ZeroDivisionError"),
    "too few rows": (lambda x: x[1:], "one row of outputs per row of inputs"),
    "one number": (lambda x: x.sum(), "one row of outputs"),
    "no width": (lambda x: x.sum(1), r"add a dimension: y\[..., None\]"),
    "three dimensions": (lambda x: x.unsqueeze(2), "one row of outputs"),
    "nothing": (lambda x: x[:, :0], "one row of outputs"),
    "None": (lambda x: None, "got None, as of a function without return"),
    "a list": (lambda x: [["a"]] * len(x), "must return numbers, got a list with 'a' in it"),
    "complex": (lambda x: x * 1j, "complex"),
    "sparse": (lambda x: x.to_sparse(), "must return a dense tensor"),
    "strings": (lambda x: np.array([["a"]] * len(x)), "an array of <U1"),
    "wrong width": (lambda x: torch.cat([x, x], 1), "must equal out_features"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_function_broken_from_the_start(name):
    fn, says = BROKEN[name]
    layer = BlackBox(fn, 3, 3)
    with pytest.raises(BoxError, match=says):
        layer(torch.zeros(4, 3))


@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
@pytest.mark.parametrize("name", BROKEN)
def test_function_that_breaks_in_the_backward_pass(name, estimator):
    fn, says = BROKEN[name]
    broken = False
    layer = BlackBox(lambda x: fn(x) if broken else torch.sin(x), 3, estimator=estimator, seed=0)
    x, gy = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)
    torch.autograd.grad(layer(x), x, gy)
    before = copy.deepcopy(layer.state_dict())
    y = layer(x)
    broken = True
    with pytest.raises(BoxError, match=says) as caught:
        torch.autograd.grad(y, x, gy)
    assert same_state(layer.state_dict(), before, but=["progress"])
    assert layer.progress.steps == 1
    if name == "raises":
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    # The layer is as usable as before, and goes on as if nothing had happened.
    broken = False
    twin = BlackBox(torch.sin, 3, estimator=estimator)
    twin.load_state_dict(before)
    assert torch.equal(gradient(layer, x, gy), gradient(twin, x, gy))


def test_what_a_device_really_raised_is_said_and_chained():
    def device(x):
        volts = x.astype("float64")  # so arrays are what it takes, and tensors are tried first
        raise RuntimeError(f"laser off at {volts.max()}")

    with pytest.raises(BoxError, match=r"RuntimeError .* laser off .* tried otherwise, AttributeError") as caught:
        BlackBox(device, 3)(torch.zeros(4, 3))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_interrupt_is_not_swallowed():
    def fn(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        BlackBox(fn, 3)(torch.zeros(4, 3))


def test_a_device_that_expects_arrays_is_told_how():
    class Device:
        def __call__(self, x: torch.Tensor):
            return x.astype("float64")

    with pytest.raises(BoxError, match="annotate its first parameter"):
        BlackBox(Device(), 3)(torch.zeros(4, 3))


def test_a_failed_first_call_teaches_nothing():
    broken = True

    def fn(x):
        return x[:, : len(x)] if broken else torch.sin(x)

    layer = BlackBox(fn, 5, evaluator=Local(max_rows=4))
    with pytest.raises(BoxError, match="width must not change"):
        layer(torch.randn(7, 5))
    assert layer.out_features is None
    broken = False
    assert layer(torch.randn(7, 5)).shape == (7, 5)


# ---- a thousand random bad inputs

SHAPES = st.sampled_from([(), (3,), (0, 3), (1, 3), (4, 3), (4, 2), (4, 5), (2, 2, 3), (2, 0, 3), (0,)])
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.bool])
VALUES = st.sampled_from([0.0, 1.0, -3.0, 1e-30, 1e30, -1e38, 3e38, math.nan, math.inf, -math.inf])
FUNCTIONS = {
    "sin": torch.sin,
    "root": root,
    "steep": lambda x: torch.exp(80 * x),
    "constant": torch.zeros_like,
    "steps": torch.round,
    "integers": lambda x: x.long() if torch.isfinite(x).all() and x.abs().max() < 1e9 else x,
    "numpy": lambda x: np.log(np.asarray(x)),
    "random": lambda x: x + 1e-2 * torch.rand(x.shape),
    **{name: fn for name, (fn, _) in BROKEN.items()},
}


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    name=st.sampled_from(sorted(FUNCTIONS)),
    shape=SHAPES,
    dtype=DTYPES,
    values=st.lists(VALUES, min_size=1, max_size=6),
    estimator=st.sampled_from(["central", "forward", "simultaneous"]),
    policy=st.sampled_from(["bond", Bond(max_step=math.inf), Bond("error-terms"), Fixed(0.1), Gaussian(10.0)]),
    limits=st.sampled_from([None, (-1.0, 1.0), (0.0, math.inf)]),
    max_rows=st.sampled_from([None, 1, 5]),
    breaks_in_backward=st.booleans(),
)
@pytest.mark.filterwarnings("ignore")
def test_a_thousand_bad_inputs(name, shape, dtype, values, estimator, policy, limits, max_rows, breaks_in_backward):
    good = True
    settings = {"estimator": estimator, "policy": policy, "limits": limits, "seed": 0}
    layer = BlackBox(lambda x: x * 1 if good else FUNCTIONS[name](x), 3, evaluator=Local(max_rows=max_rows), **settings)
    gradient(layer, torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.ones(4, 3))
    before = copy.deepcopy(layer.state_dict())
    n = math.prod(shape)
    x = torch.tensor((values * (n + 1))[:n], dtype=torch.float64).to(dtype).view(shape)
    if dtype.is_floating_point:
        x.requires_grad_()
    try:
        good = breaks_in_backward
        y = layer(x)
        good = False
        y.sum().backward()
    except (ValueError, TypeError, BoxError) as error:
        assert any(word in str(error) for word in ("must", "raised", "empty", "complex")), error
        assert same_state(layer.state_dict(), before, but=["progress"])
        return
    # A true slope beyond the range of fp16 is infinite there, as it is in any network.
    assert not x.grad.isnan().any() if dtype == torch.float16 else torch.isfinite(x.grad).all()
    assert all(torch.isfinite(b).all() for b in layer.buffers())
