"""Readings of the paper: each does what its sentence in `settings.Reading` says."""

import copy
import math
from dataclasses import replace

import pytest
import torch

import bondgrad
from bondgrad.experiments import readings
from bondgrad.experiments.model import made_policy
from bondgrad.experiments.settings import Gradient, Optimizer, Reading, Schedule
from bondgrad.policies import Bond, Calibrated, Fixed, Gaussian
from tests.experiments.test_trainer import ECHO, HOUSING, finish, same_state, start, weights

B, D = 6, 3
WEIGHT = torch.linspace(-1, 1, D * D).view(D, D) + torch.eye(D)


def smooth(x):
    """A box with a Jacobian that is not diagonal."""
    return torch.tanh(x @ WEIGHT)


def backward(gradient, policy=None, x=None, gy=None, structure=None, state=None, fn=smooth):
    """The gradient that a box with the estimator and policy of these settings gives, and the step that it took."""
    x = torch.randn(B, D, dtype=torch.float64) if x is None else x
    gy = torch.randn_like(x) if gy is None else gy
    box = bondgrad.BlackBox(
        fn,
        D,
        estimator=readings.estimator(gradient, D, D),
        policy=readings.policy(policy or Fixed(1e-5), gradient.reading),
        structure=structure,
        state=state,
        seed=0,
    )
    seen = []
    box.register_step_hook(lambda _, step: seen.append(step))
    point = x.clone().requires_grad_()
    box(point).backward(gy)
    return point.grad, seen[0], box


def test_normalised_before_the_contraction_the_jacobian_has_norm_one():
    x, gy = torch.randn(B, D, dtype=torch.float64), torch.randn(B, D, dtype=torch.float64)
    fn = lambda x: torch.tanh(x @ WEIGHT.double())  # noqa: E731
    g, _, _ = backward(Gradient(normalize_rows=True, reading=Reading(normalize="before")), x=x, gy=gy, fn=fn)
    exact = torch.func.vmap(torch.func.jacrev(fn))(x)
    expected = torch.einsum("bo,boi->bi", gy, exact / exact.flatten(1).norm(dim=1)[:, None, None])
    assert torch.allclose(g, expected, rtol=1e-5)
    after, _, _ = backward(Gradient(normalize_rows=True), x=x, gy=gy, fn=fn)
    assert torch.allclose(after.norm(dim=1), torch.ones(B, dtype=torch.float64))
    assert not torch.allclose(g.norm(dim=1), torch.ones(B, dtype=torch.float64))


def test_normalised_before_through_time_every_time_step_is_a_row():
    """Of a sequence box without memory, rows are time steps: the same as without time."""
    x, gy = torch.randn(1, B, D, dtype=torch.float64), torch.randn(1, B, D, dtype=torch.float64)
    how = Gradient(normalize_rows=True, reading=Reading(normalize="before"))
    fn = lambda x: torch.tanh(x @ WEIGHT.double())  # noqa: E731
    in_time, _, _ = backward(how, x=x, gy=gy, fn=fn, structure=bondgrad.structure.Sequence(horizon=1))
    alone, _, _ = backward(how, x=x[0], gy=gy[0], fn=fn)
    assert torch.allclose(in_time[0], alone, rtol=1e-4)


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_literal_bonds_is_its_formula(elementwise, before, n):
    """On a linear box Y(x⁺) - Y(x⁻) is exactly the matrix times the way between."""
    x, gy = torch.randn(B, D, dtype=torch.float64), torch.randn(B, D, dtype=torch.float64)
    matrix = WEIGHT.double()
    ways = []

    def fn(x):
        ways.append(x.clone())
        return x @ matrix

    bonds = "elementwise" if elementwise else "contracted"
    reading = Reading(bonds=bonds, mean="plain", normalize="before" if before else "after")
    g, _, _ = backward(Gradient("BONDS", normalize_rows=before, n=n, reading=reading), x=x, gy=gy, fn=fn)
    points = ways[-1].view(B, n, 2, D)
    s = points[:, :, 0] - points[:, :, 1]  # [B, n, D]
    change = s @ matrix
    beside = change / s if elementwise else change[..., None] / s[..., None, :]  # [B, n, D] or [B, n, D_out, D]
    if before:
        norm = beside.flatten(2).norm(dim=2)  # [B, n] of each row and perturbation
        beside = beside / norm.view(B, n, *[1] * (beside.ndim - 2))
    products = gy[:, None] * beside if elementwise else (gy[:, None, :, None] * beside).sum(2)
    assert torch.allclose(g, products.mean(1), rtol=1e-6)


def test_elementwise_needs_as_many_outputs_as_inputs():
    how = Gradient("BONDS", reading=Reading(bonds="elementwise"))
    with pytest.raises(ValueError, match="as many outputs as inputs, got 3 inputs and 2 outputs"):
        readings.estimator(how, 3, 2)


def test_shared_perturbations_are_the_same_in_all_rows():
    asked = []

    def fn(x):
        asked.append(x.clone())
        return torch.sin(x)

    x = torch.randn(B, D, dtype=torch.float64)
    for reading, rows in ((Reading(), B), (Reading(perturbations="shared"), 1)):
        asked.clear()
        backward(Gradient("BONDS", reading=reading), Gaussian(1e-2), x=x, fn=fn)
        delta = (asked[-1].view(B, 2, D)[:, 0] - x) * 1e6  # the rounding of x differs between rows
        assert len(delta.round().unique(dim=0)) == rows


def test_without_a_least_step_it_may_vanish_in_the_rounding():
    asked = []

    def fn(x):
        asked.append(x.clone())
        return torch.sin(x)

    x = torch.ones(B, D)
    for reading, moves in ((Reading(), True), (Reading(least_step=False), False)):
        asked.clear()
        g, _, _ = backward(Gradient(reading=reading), Fixed(1e-12), x=x, fn=fn)
        assert bool((asked[-1] != 1).any()) is moves
        assert bool((g != 0).any()) is moves


def test_scaled_error_terms_are_scaled_by_the_largest_moment():
    m, v = torch.tensor([0.5, -2.0]), torch.tensor([1.0, 4.0])
    g, step = torch.tensor([0.5, -2.0]), torch.tensor([1e-3, 1e-3])
    plain = Bond("error-terms", max_step=math.inf)
    scaled = readings.policy(plain, Reading(error_terms="scaled"))
    (low, high), (lower, upper) = (policy.error_terms(m, v, g, step, 1e-7) for policy in (plain, scaled))
    assert torch.isfinite(high).all()
    assert torch.equal(lower, low)
    assert torch.allclose(upper, 2 * high)
    assert scaled.max_step == math.inf
    with pytest.raises(ValueError, match="is for a policy with bounds: error-terms"):
        readings.policy(Bond(), Reading(error_terms="scaled"))


def test_a_policy_that_measures_has_no_other_reading():
    with pytest.raises(ValueError, match="for policies of the paper"):
        readings.policy(Calibrated(), Reading(perturbations="shared"))


def test_adam_s_bound_follows_the_schedule():
    how = Gradient(policy={"kind": "bond", "bounds": "adam"}, reading=Reading(eta="scheduled"))
    settings = replace(
        HOUSING, gradient=how, epochs=4, steps=2, schedule=Schedule((0.5,), (1.0, 0.1)), optimizer=Optimizer(rate=0.01)
    )
    assert [made_policy(settings, epoch).eta for epoch in range(4)] == pytest.approx([0.01, 0.01, 0.001, 0.001])
    run = start(settings)
    run.turn(10)
    run.turn(10)
    assert run.parts.black_box.policy.eta == pytest.approx(0.001)
    resumed = start(settings)
    resumed.load(copy.deepcopy(run.state()))
    assert resumed.parts.black_box.policy.eta == pytest.approx(0.001)
    assert same_state(weights(finish(run)), weights(finish(resumed)))


def test_dense_bonds_hears_all_outputs():
    box = {"kind": "parallel", "blocks": 5, "n_in": 1, "hidden": 8, "n_out": 1}
    runs = [start(replace(HOUSING, box=box, gradient=Gradient("BONDS", structure=s))) for s in (None, "dense")]
    blocks, dense = (finish(run).record()["sign_accuracy"] for run in runs)
    assert blocks > 0.97  # one input for each output: nothing is mixed
    assert dense < 0.75


@pytest.mark.parametrize("method", ["BOND", "BONDS"])
def test_readings_train_through_an_echo(method):
    reading = Reading(
        perturbations="shared", normalize="before", bonds="elementwise" if method == "BONDS" else "contracted"
    )
    how = Gradient(method, normalize_rows=True, reading=reading)
    record = finish(start(replace(HOUSING, box=ECHO | {"horizon": 1}, gradient=how))).record()
    assert record["failed"] is None
    assert record["parameter_sign_accuracy"] > 0.5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"perturbations": "all"}, "perturbations must be one of per-row, shared, got 'all'"),
        ({"bonds": 1}, "bonds must be one of"),
        ({"least_step": 0}, "least_step must be true or false"),
    ],
)
def test_there_are_no_other_readings(change, says):
    with pytest.raises(ValueError, match=says):
        Reading(**change)


@pytest.mark.parametrize(
    ("gradient", "says"),
    [
        (Gradient("BOND", reading=Reading(bonds="elementwise")), "are readings of BONDS, not of BOND"),
        (Gradient("BOND", reading=Reading(normalize="before")), "needs normalize_rows: true"),
        (Gradient("forward", normalize_rows=True, reading=Reading(normalize="before")), "and BOND or BONDS"),
        (Gradient(reading=Reading(eta="scheduled")), "needs a policy with bounds: adam"),
    ],
)
def test_a_reading_without_effect_is_refused(gradient, says):
    with pytest.raises(ValueError, match=says):
        replace(HOUSING, gradient=gradient)


def test_a_move_that_vanishes_costs_its_own_entry_alone():
    """Normalised before, the other inputs of the row still have norm 1."""
    x = torch.tensor([[1e-3, 1e-3, 1e6]])
    reading = Reading(normalize="before", least_step=False)
    g, _, _ = backward(
        Gradient(normalize_rows=True, reading=reading), Fixed(1e-4), x=x, gy=torch.ones(1, 3), fn=torch.clone
    )
    assert torch.allclose(g, torch.tensor([[0.5**0.5, 0.5**0.5, 0.0]]), atol=1e-3)


@pytest.mark.parametrize("n", [1, 3])
def test_shared_perturbations_of_a_sequence_are_the_same_in_all_time_steps(n):
    asked = []

    def fn(x):
        asked.append(x.clone())
        return torch.sin(x)

    x = torch.randn(1, B, D, dtype=torch.float64)
    how = Gradient("BONDS", n=n, reading=Reading(perturbations="shared"))
    backward(how, Gaussian(1e-2), x=x, fn=fn, structure=bondgrad.structure.Sequence(horizon=1))
    delta = (asked[-1].view(n, 2, B, D)[:, 0] - x) * 1e6
    assert delta.round().unique(dim=1).shape[1] == 1  # over time
    assert len(delta.round().unique(dim=0)) == n  # perturbations differ


def test_defaults_are_left_out_of_files():
    """So that results of versions without readings are known again."""
    plain = HOUSING.as_dict()
    assert {"reading", "structure"}.isdisjoint(plain["gradient"])
    assert "compile" not in plain
    how = Gradient("BONDS", structure="dense", reading=Reading(mean="plain"))
    changed = replace(HOUSING, compile=True, gradient=how)
    assert changed.as_dict()["gradient"]["reading"] == {"mean": "plain"}
    assert changed.as_dict()["gradient"]["structure"] == "dense"
    assert changed.as_dict()["compile"] is True
