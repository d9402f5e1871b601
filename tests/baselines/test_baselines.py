"""Baselines on parameters."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from bondgrad.baselines import FDSA, PGT, SPSA
from bondgrad.networks import ffnn


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    model = ffnn([3, 5, 1]).to(dtype)
    x, y = torch.randn(10, 3, dtype=dtype), torch.randn(10, 1, dtype=dtype)

    def closure():
        return nn.functional.mse_loss(model(x), y)

    exact = torch.autograd.grad(closure(), list(model.parameters()))
    return model, closure, exact


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


def error(model, exact):
    g = flat(p.grad for p in model.parameters())
    return float((g - flat(exact)).norm() / flat(exact).norm())


def test_fdsa_is_exact_and_of_second_order():
    errors = []
    for mu in (0.08, 0.04, 0.02):
        model, closure, exact = problem()
        FDSA(model.parameters(), mu=mu).estimate(closure)
        errors.append(error(model, exact))
    assert errors[-1] < 1e-3
    for larger, smaller in pairwise(errors):
        assert 3.6 < larger / smaller < 4.4


@pytest.mark.parametrize("method", [SPSA, PGT])
def test_the_error_falls_with_the_root_of_the_directions(method):
    errors = []
    for n in (100, 400, 1600, 6400):
        model, closure, exact = problem()
        method(model.parameters(), mu=1e-4, n=n, seed=1).estimate(closure)
        errors.append(error(model, exact))
    rate = math.log(errors[-1] / errors[0]) / math.log(64)
    assert abs(rate + 0.5) < 0.12
    assert errors[-1] < 0.15


@pytest.mark.parametrize("method", [SPSA, PGT])
def test_one_direction_is_right_along_itself(method):
    model, closure, exact = problem()
    parameters = list(model.parameters())
    seen = []

    def recording():
        seen.append(flat(p.detach().clone() for p in parameters))
        return closure()

    method(parameters, mu=1e-5, seed=1).estimate(recording)
    span = seen[0] - seen[1]
    g = flat(p.grad for p in parameters)
    assert torch.allclose(g * span, (flat(exact) @ span).expand_as(g), rtol=1e-5)
    assert len(span.abs().round(decimals=9).unique()) == (1 if method is SPSA else span.numel())


@pytest.mark.parametrize("method", [SPSA, PGT, FDSA])
def test_the_realised_step_is_divided_by(method):
    w = torch.tensor([4096.0], requires_grad=True)  # where float32 can move by multiples of 4.9e-4 only
    method([w], mu=7e-4).estimate(lambda: 3.0 * w.double().sum())
    assert math.isclose(w.grad, 3.0, rel_tol=1e-6)


@pytest.mark.parametrize("method", [SPSA, PGT])
def test_sums_of_half_precision_do_not_stall(method):
    w = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    slope = torch.tensor([1.0, 2.0, 3.0])
    method([w], mu=0.0625, n=2000, seed=0).estimate(lambda: w.float() @ slope)
    assert w.grad.dtype == torch.bfloat16
    assert torch.allclose(w.grad.float(), slope, atol=0.3)


@pytest.mark.parametrize("method", [SPSA, PGT, FDSA])
def test_parameters_of_all_kinds_together(method):
    """In two precisions, and not in order in memory; each one's gradient lies as it does."""
    w = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    v = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    empty = torch.zeros(0, requires_grad=True)
    method([w, v, empty], mu=0.5, **({} if method is FDSA else {"seed": 0, "n": 2000})).estimate(
        lambda: 2 * w[1, 2, 3, 4].double() + 3 * v[5]
    )
    largest = [int(p.grad.argmax()) for p in (w, v)]
    assert largest == [w.numel() - 1, 5]
    assert torch.stack([w.grad[1, 2, 3, 4].double(), v.grad[5]]).tolist() == pytest.approx([2, 3], abs=0.2)
    assert [p.grad.dtype for p in (w, v)] == [torch.float32, torch.float64]
    assert w.grad.stride() == w.stride()
    assert empty.grad.numel() == 0


@pytest.mark.parametrize("method", [SPSA, PGT, FDSA])
def test_parameters_come_back_bit_for_bit_even_after_an_exception(method):
    model, closure, _ = problem(torch.float32)
    before = flat(p.detach().clone() for p in model.parameters())
    method(model.parameters()).estimate(closure)
    assert torch.equal(flat(model.parameters()), before)
    calls = iter(range(3))

    def failing():
        if next(calls) == 1:
            raise OSError("cable")
        return closure()

    with pytest.raises(OSError, match="cable"):
        method(model.parameters()).estimate(failing)
    assert torch.equal(flat(model.parameters()), before)


@pytest.mark.parametrize("method", [SPSA, PGT, FDSA])
def test_losses_that_are_not_finite_are_left_out(method):
    w = torch.ones(3, requires_grad=True)
    method([w]).estimate(lambda: math.nan)
    assert torch.equal(w.grad, torch.zeros(3))


@pytest.mark.parametrize("method", [SPSA, PGT])
def test_the_mean_is_over_the_directions_that_are_left(method):
    w = torch.zeros(1, requires_grad=True)
    calls = iter(range(8))
    method([w], n=4, seed=0).estimate(lambda: 3 * w.sum() if next(calls) < 4 else math.inf)
    assert w.grad.item() == pytest.approx(3)


@pytest.mark.parametrize("method", [SPSA, PGT, FDSA])
def test_a_step_that_rounding_swallows_gives_no_gradient(method):
    w = torch.tensor([1e10, 1.0], requires_grad=True)
    method([w], mu=0.125).estimate(lambda: w[1].double())
    assert w.grad[0] == 0
    assert w.grad[1] == 1


@pytest.mark.parametrize("method", [SPSA, PGT])
def test_the_seed_decides(method):
    grads = []
    for seed in (1, 1, 2):
        model, closure, _ = problem()
        method(model.parameters(), seed=seed).estimate(closure)
        grads.append(flat(p.grad for p in model.parameters()))
    assert torch.equal(grads[0], grads[1])
    assert not torch.equal(grads[0], grads[2])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SPSA([]), "params is empty"),
        (lambda: SPSA([torch.ones(3)], mu=0), "mu must be a positive"),
        (lambda: SPSA([torch.ones(3)], n=0), "n must be a positive"),
        (lambda: FDSA([torch.ones(3)], mu=-1), "mu must be a positive"),
        (lambda: PGT([torch.ones(3)], r=1.0), "r must be in"),
    ],
)
def test_bad_arguments(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_parameters_must_be_leaves():
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(TypeError, match="leaf tensors"):
        SPSA([w * 2])
    with pytest.raises(TypeError, match="put a single one into a list"):
        SPSA(w)
