"""Calibrated steps where data, loss or box are not as one would wish, or do not stay as they were."""

import itertools
import warnings

import pytest
import torch

from bondgrad import BlackBox
from bondgrad.evaluators import Local
from tests.helpers import close, gradient, noisy
from tests.policies.test_calibrated import D, K, exact_gradient, layer_of, problems, signs_right, trained, waves


def errors_over(layer, fn, n, rows=64, scale=1.0, seed=3):
    """The relative error of each of n gradients."""
    errors = []
    for x, gy in problems(n, rows=rows, seed=seed):
        x = scale * (x.abs() + 0.1)
        exact = exact_gradient(fn, x, gy)
        errors.append(float((gradient(layer, x, gy) - exact).norm() / exact.norm()))
    return errors


# ---- little to learn from


@pytest.mark.parametrize("alive", [slice(-1, None), slice(5, 7)])
def test_a_loss_of_few_rows(alive):
    layer = layer_of(waves)
    for x, gy in problems(50):
        few = torch.zeros_like(gy)
        few[alive] = gy[alive]
        g = gradient(layer, x, few)
    assert layer.policy_state.schedule.trials > 5
    assert close(g, exact_gradient(waves, x, few), 1e-6)


def test_the_last_of_many_time_steps():
    layer = layer_of(waves)
    for x, gy in problems(50, rows=8 * 10):
        gy = gy.view(8, 10, K) * (torch.arange(10) == 9).view(1, 10, 1)
        g = gradient(layer, x.view(8, 10, D), gy)
    assert close(g.view(-1, D), exact_gradient(waves, x, gy.view(-1, K)), 1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_one_noisy_row_at_a_time(seed):
    layer = trained(layer_of(noisy(waves, 1e-2, seed), seed=seed), 100, rows=1, seed=seed)
    assert layer.policy_state.step.min() > 1e-2
    right = [
        signs_right(gradient(layer, x, gy), exact_gradient(waves, x, gy)) for x, gy in problems(50, rows=1, seed=10)
    ]
    assert sum(right) / len(right) > 0.9


@pytest.mark.parametrize("offset", [1e3, 1e6])
def test_inputs_far_from_zero(offset):
    layer = layer_of(lambda x: torch.sin(x - offset), k=D)
    for x, gy in problems(20, k=D):
        assert close(gradient(layer, x + offset, gy), gy * torch.cos(x + offset - offset), 1e-2)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_what_it_costs(rows):
    layer, plain = trained(layer_of(noisy(waves, 1e-3)), 500, rows=rows), 500 * rows * (1 + 2 * D)
    assert plain < layer.stats.evaluations < 1.05 * plain


# ---- a box that raises


def test_a_box_that_raises_outside_its_domain():
    def roots(x: torch.Tensor):
        if (x < 0).any():
            raise ValueError("negative")
        return x[:, :3].sqrt()  # the fourth input does nothing: longer steps are tried out, until rows fail

    layer = layer_of(roots, k=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, gy in problems(100, k=3):
            g = gradient(layer, x.abs() + 0.05, gy)
    raised, *no_output = (str(warning.message) for warning in caught)  # once each, in a hundred steps
    assert "remained without an output, since the box roots raised ValueError" in raised
    assert len(no_output) == 1
    assert layer.stats.failures < 0.002 * layer.stats.evaluations
    assert close(g, exact_gradient(roots, x.abs() + 0.05, gy), 0.01)


def test_a_box_that_answers_no_trial_at_all():
    class Noting(Local):
        purpose = None

        def evaluate(self, request):
            self.purpose = request.purpose
            return super().evaluate(request)

    def fn(x: torch.Tensor):
        moved = (x[:, None] != rows).any(2).all(1)
        if evaluator.purpose == "trial" and bool(moved.any()):
            raise OSError("away")
        return waves(x)

    evaluator = Noting(retries=0)
    layer = layer_of(fn, evaluator=evaluator)
    (rows, gy), *_ = problems(1)
    with pytest.warns(UserWarning, match="raised an error when it was tried out with other steps than usual"):
        g = gradient(layer, rows, gy)
    assert torch.isfinite(g).all()


# ---- what changes


@pytest.mark.parametrize("rows", [8, 64])
def test_inputs_that_shrink(rows):
    def fn(x):
        return torch.sin(x.log() @ torch.ones(D, K, dtype=x.dtype))

    layer = layer_of(fn)
    errors_over(layer, fn, 100, rows)
    assert max(errors_over(layer, fn, 100, rows, scale=1e-3)) < 0.05


def test_noise_out_of_the_blue():
    sigma = [0.0]
    random = torch.Generator().manual_seed(0)

    def fn(x):
        y = waves(x)
        return y + sigma[0] * torch.randn(y.shape, dtype=y.dtype, generator=random)

    layer = trained(layer_of(fn), 200, rows=64)
    sigma[0] = 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(layer, 100, rows=64)
    right = [signs_right(gradient(layer, x, gy), exact_gradient(waves, x, gy)) for x, gy in problems(20, seed=4)]
    assert sum(right) / len(right) > 0.95
    sigma[0] = 1e-3
    trained(layer, 600, rows=64)
    assert 0.5 < float(layer.policy_state.noise * layer.policy_state.unit**2) / (1e-3**2 / 2) < 2


def test_another_box_in_its_place():
    layer = trained(layer_of(waves), 100)
    layer.fn = noisy(waves, 0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it never said that it would answer alike
        right = [signs_right(gradient(layer, x, gy), exact_gradient(waves, x, gy)) for x, gy in problems(20, seed=4)]
    assert sum(right) / len(right) > 0.9


# ---- eval mode, and what is said


def test_gradients_in_eval_mode_find_their_steps_once():
    layer = layer_of(waves).eval()
    spent = []
    for x, gy in problems(5):
        before = layer.stats.evaluations
        assert close(gradient(layer, x, gy), exact_gradient(waves, x, gy), 1e-4)
        spent.append(layer.stats.evaluations - before)
    assert spent[0] > spent[1] == spent[4] == 32 * (1 + 2 * D)
    assert not layer.policy_state.step.any()


def test_a_seed_in_vain():
    def fn(x, seed):
        return torch.sin(x)

    with pytest.warns(UserWarning, match="does not cancel"):
        BlackBox(fn, D, estimator="forward")


def test_a_standard_error_that_is_not_known_yet():
    layer, errors = layer_of(noisy(waves, 0.03)), []
    layer.register_step_hook(lambda layer, step: errors.append(layer.standard_error(step)))
    trained(layer, 20, rows=1)
    assert errors[0].isnan().all()
    assert (errors[-1] > 0).all()


def test_the_standard_error_within_limits():
    ratios = []

    def look(layer, step):
        exact = step.gy.sum(1, keepdim=True).expand_as(step.g)
        ratios.append((step.g - exact) / layer.standard_error(step))

    for seed in range(4):  # a few trials say little
        layer = layer_of(noisy(lambda x: x @ torch.ones(D, K, dtype=x.dtype), 0.03, seed), limits=(-1, 1), seed=seed)
        steps = problems(200, seed=1 + seed)
        for x, gy in itertools.islice(steps, 50):
            gradient(layer, x.tanh(), gy)
        layer.register_step_hook(look)
        for x, gy in steps:
            gradient(layer, x.tanh(), gy)
    assert float(torch.stack(ratios).square().mean().sqrt()) == pytest.approx(1, abs=0.15)


# ---- slopes of nothing, and of more than there is


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("live", [(1.0, 1, 0, 0), (0.0, 0, 0, 1)])
def test_inputs_that_have_no_influence_do_not_make_first_steps_long(live, rows):
    layer = layer_of(lambda x: torch.sin(3 * x) * torch.tensor(live).to(x), k=D)
    trained(layer, 1, rows=rows)
    assert layer.policy_state.step.max() < 1e-3
    for x, gy in problems(10, rows=rows, k=D, seed=2):
        assert close(gradient(layer, x, gy), exact_gradient(lambda x: torch.sin(3 * x) * torch.tensor(live), x, gy))


@pytest.mark.parametrize("size", [1e60, 1e120])
def test_slopes_beyond_single_precision_keep_their_first_steps(size):
    layer = trained(layer_of(lambda x: size * waves(x)), 60)
    assert all(buffer.isfinite().all() for buffer in layer.policy_state.buffers())
    assert layer.policy_state.round == 0  # nothing can be learnt of them
    for x, gy in problems(10, seed=2):
        assert close(gradient(layer, x, gy) / size, exact_gradient(waves, x, gy), 1e-6)
    assert layer.health.last.signal > 1e6
    assert layer.health.last.drowned < 1e-6
