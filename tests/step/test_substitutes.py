"""Rows of a forward pass without a finite output: their substitutes, their gradient, and what learns of them."""

import contextlib
import copy
import math

import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.evaluators import Local, Progress
from bondgrad.policies import Fixed
from bondgrad.step._substitutes import MEAN_BATCHES, MEAN_STEPS, learn_mean, with_substitutes
from bondgrad.structure import Sequence
from tests.helpers import close, gradient, root, same_state

TOLD = "rows? got no finite output"


class Fragile:
    """The sine, but for rows with a first input above 5: they have no output, or that output is not finite."""

    def __init__(self, raises=False):
        self.raises, self.rows = raises, 0

    def __call__(self, x: torch.Tensor):
        self.rows += len(x)
        bad = x[:, :1] > 5
        if self.raises and bool(bad.any()):
            raise ValueError("too high")
        return torch.where(bad, math.nan, torch.sin(x))


def batch(n=6, bad=(2,)):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    x[list(bad), 0] = 9.0
    return x


@contextlib.contextmanager
def told_of(rows, raises):
    """Warnings of failed rows, and of errors if there were any; and no others."""
    asked = pytest.warns(UserWarning, match="Fragile raised ValueError") if raises else contextlib.nullcontext()
    with pytest.warns(UserWarning, match=f"{rows} {TOLD}"), asked:
        yield


# ---- the mean


def test_the_mean_is_that_of_all_batches_and_after_a_while_of_the_last_ones():
    progress = Progress()
    for value in (2.0, 4.0, 9.0):
        learn_mean(progress, torch.tensor([[value - 1, 0.0], [value + 1, 0.0]]), None)
    assert progress.output_mean.tolist() == pytest.approx([5, 0])
    progress.batches = 1000
    learn_mean(progress, torch.tensor([[105.0, 1.0]]), None)
    assert progress.batches == MEAN_BATCHES == 16
    assert progress.output_mean.tolist() == pytest.approx([5 + 100 / 16, 1 / 16])


def test_the_mean_is_that_of_finite_outputs():
    progress = Progress()
    y = torch.tensor([[1.0, math.nan, math.nan], [3.0, 5.0, math.inf]])
    learn_mean(progress, y, torch.isfinite(y))
    assert progress.output_mean.tolist() == [2, 5, 0]  # nothing is known of the last one
    y = torch.tensor([[math.nan, 7.0, 4.0]])
    learn_mean(progress, y, torch.isfinite(y))
    assert progress.output_mean.tolist() == [2, 6, 2]  # the first one had no output this time


def test_the_mean_begins_anew_where_the_width_or_the_type_changes():
    progress = Progress()
    learn_mean(progress, torch.ones(4, 2), None)
    learn_mean(progress, torch.full((4, 3), 2.0), None)
    assert (progress.output_mean.tolist(), progress.batches) == ([2, 2, 2], 1)
    learn_mean(progress, torch.full((4, 3), 3.0).double(), None)
    assert progress.output_mean.dtype == torch.float64
    assert (progress.output_mean.tolist(), progress.batches) == ([3, 3, 3], 1)


def test_outputs_whose_sum_is_too_large_do_not_spoil_the_mean():
    progress = Progress()
    for value in (1.0, 3e38, 1.0):
        learn_mean(progress, torch.full((4, 2), value), None)
    assert torch.isfinite(progress.output_mean).all()


def test_outputs_that_are_not_finite_are_replaced_one_by_one():
    progress = Progress(output_mean=torch.tensor([7.0, 8.0]), batches=1)
    y = torch.tensor([[1.0, math.nan], [math.inf, -math.inf], [2.0, 3.0]])
    replaced = with_substitutes(progress, y, torch.isfinite(y), training=False)
    assert replaced.isnan().tolist() == [[False, True], [True, True], [False, False]]
    assert progress.batches == 1  # nothing is learnt in evaluation
    mean = [(7 + 1.5) / 2, (8 + 3) / 2]
    assert with_substitutes(progress, y, torch.isfinite(y), training=True).tolist() == [[1, mean[1]], mean, [2, 3]]


# ---- the forward pass


@pytest.mark.parametrize("raises", [False, True])
def test_in_training_the_mean_of_the_outputs_stands_for_a_row_without_one(raises):
    layer = BlackBox(Fragile(raises), 3)
    assert layer.last_ok is None
    x = batch()
    with told_of(1, raises):
        y = layer(x)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(y[others], x[others].sin())
    assert torch.allclose(y[2], x[others].sin().mean(0))
    assert layer.last_ok.tolist() == [True, True, False, True, True, True]
    assert layer.stats.failures == 1
    y = layer(x[others])
    assert torch.equal(y, x[others].sin())
    assert layer.last_ok.tolist() == [True] * 5
    assert layer.stats.failures == 1


def test_in_evaluation_the_output_stays_nan_and_nothing_is_learnt():
    layer = BlackBox(root, 1)
    layer(torch.tensor([[16.0]]))
    layer.eval()
    before = copy.deepcopy(layer.state_dict())
    with pytest.warns(UserWarning, match=f"1 {TOLD}.*NaN in evaluation"):
        y = layer(torch.tensor([[4.0], [-1.0]]))
    assert y[0] == 2
    assert y[1].isnan()
    assert layer.last_ok.tolist() == [True, False]
    assert layer.stats.failures == 1
    assert layer.progress.output_mean.tolist() == [4]
    assert same_state(layer.state_dict(), before, but=["requests"])


@pytest.mark.parametrize("training", [True, False])
def test_where_failures_are_errors_the_forward_pass_raises(training):
    layer = BlackBox(Fragile(), 3, on_failure="raise", seed=0).train(training)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(BoxError, match=f"2 {TOLD}. Give limits= within which the box answers"):
        layer(batch(bad=(1, 4)))
    assert same_state(layer.state_dict(), before, but=["progress"])
    assert torch.equal(layer(batch(bad=())), batch(bad=()).sin())


def test_rows_are_counted_over_leading_dimensions_and_sequences_as_one():
    layer = BlackBox(Fragile(), 3)
    x = batch(8, bad=(5,)).view(2, 4, 3)
    with pytest.warns(UserWarning, match=f"1 {TOLD}"):
        assert layer(x).shape == (2, 4, 3)
    assert layer.last_ok.tolist() == [True] * 5 + [False] + [True] * 2
    layer = BlackBox(lambda x: x.cumsum(1).masked_fill(x > 5, math.nan), 3, structure=Sequence())
    with pytest.warns(UserWarning, match=f"1 {TOLD}"):
        layer(x)
    assert layer.last_ok.tolist() == [True, False]


def test_in_training_every_eighth_step_counts_for_the_mean_and_those_with_failures():
    layer, counted = BlackBox(Fragile(), 3, policy=Fixed(1e-3)), []
    for _ in range(2 * MEAN_STEPS):
        gradient(layer, batch(bad=()), torch.ones(6, 3))
        counted.append(layer.progress.batches)
    assert counted == [1] * 8 + [2] * 8
    assert layer.progress.steps == 16
    gradient(layer, batch(bad=()), torch.ones(6, 3))
    with told_of(1, False):
        layer(batch())
    assert layer.progress.batches == 4


def test_the_mean_is_saved_and_a_copy_has_no_last_rows():
    layer, other = (BlackBox(Fragile(), 3, 3, seed=0) for _ in range(2))
    layer(batch(bad=()))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.progress.output_mean, batch(bad=()).sin().mean(0))
    with pytest.warns(UserWarning, match=TOLD):
        assert torch.equal(layer(batch()), other(batch()))
    assert copy.deepcopy(layer).last_ok is None
    assert copy.deepcopy(layer).progress.batches == 2


# ---- the gradient


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("policy", ["calibrated", "bond"])
@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
def test_a_row_without_an_output_has_no_gradient_and_nothing_learns_of_it(estimator, policy, raises):
    layer, twin = (BlackBox(Fragile(raises), 3, estimator=estimator, policy=policy, seed=0) for _ in range(2))
    others, seen = [0, 1, 3, 4, 5], []
    layer.register_step_hook(lambda box, step: seen.append(step.x))
    gy = torch.randn(6, 3)
    with told_of(1, raises):
        for _ in range(3):
            g = gradient(layer, batch(), gy)
            expected = gradient(twin, batch()[others], gy[others])
            assert not g[2].any()
            assert torch.equal(g[others], expected)
    assert all(torch.equal(x, batch()[others]) for x in seen)
    assert same_state(layer.state_dict(), twin.state_dict(), but=["output_mean", "batches"])
    assert torch.allclose(layer.progress.output_mean, twin.progress.output_mean)
    assert layer.stats.failures == 3
    assert twin.stats.failures == 0


def test_contexts_are_those_of_the_rows_that_are_left():
    layer = BlackBox(lambda x, c: Fragile()(x) * c, 3, policy=Fixed(1e-3))
    x, c = batch(), torch.arange(1.0, 7.0)[:, None]
    with pytest.warns(UserWarning, match=f"1 {TOLD}"):
        g = gradient(layer, x, torch.ones(6, 3), c)
    exact = x.cos() * c
    exact[2] = 0
    assert close(g, exact, 1e-2)


def test_a_row_of_which_some_outputs_came_has_the_gradient_of_those():
    def fn(x: torch.Tensor):
        y = torch.stack((x[:, 0] * x[:, 1], x.square().sum(1)), 1)
        y[:1, 1] = math.nan if len(x) == 4 else y[:1, 1]  # in the forward pass only
        return y

    layer = BlackBox(fn, 2, policy=Fixed(1e-3), evaluator=Local(retries=0))
    x, gy = torch.randn(4, 2), torch.randn(4, 2)
    with pytest.warns(UserWarning, match=f"1 {TOLD}"):
        g = gradient(layer, x, gy)
    weight = gy.clone()
    weight[0, 1] = 0
    assert close(g, weight[:, :1] * x.flip(1) + weight[:, 1:] * 2 * x, 1e-2)
    assert layer.last_ok.tolist() == [False, True, True, True]


@pytest.mark.parametrize("policy", ["calibrated", "bond", Fixed(0.1)])
def test_a_batch_without_any_output_has_no_gradient_and_training_goes_on(policy):
    layer = BlackBox(Fragile(), 3, 3, policy=policy, seed=0)
    before = copy.deepcopy(layer.state_dict())
    with pytest.warns(UserWarning, match=f"4 {TOLD}"):
        assert not layer(batch(4, bad=range(4))).any()
    g = gradient(layer, batch(4, bad=range(4)), torch.ones(4, 3))
    assert torch.equal(g, torch.zeros(4, 3))
    assert same_state(layer.state_dict(), before, but=["progress"])
    x = batch(bad=())
    assert close(gradient(layer, x, torch.ones(6, 3)), x.cos(), 0.05)


def test_with_a_memory_all_rows_go_on():
    def leaky(x, state):
        state = 0.5 * state + torch.sin(x)
        return torch.where(x[:, :1] > 5, math.nan, state), state

    layer = BlackBox(leaky, 3, state=torch.zeros(1, 3), policy=Fixed(1e-3), seed=0)
    x, memory = batch(), torch.zeros(6, 3)
    exact = x.cos()
    exact[2] = 0
    for step in range(3):
        with pytest.warns(UserWarning, match=TOLD) if step == 0 else contextlib.nullcontext():
            g = gradient(layer, x, torch.ones(6, 3))
        memory = 0.5 * memory + torch.sin(x)
        assert close(g, exact, 1e-2)
    after = layer(batch(bad=()))
    assert torch.allclose(after, 0.5 * memory + batch(bad=()).sin(), atol=1e-6)


def test_a_loss_can_leave_out_rows_without_an_output():
    layer = BlackBox(Fragile(), 3)
    with pytest.warns(UserWarning, match=TOLD):
        y = layer(batch())
    assert torch.equal(y[layer.last_ok], batch()[layer.last_ok].sin())
