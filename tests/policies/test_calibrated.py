"""policy="calibrated" and noise="auto": nothing is told, all is measured."""

import itertools
import math
import warnings

import pytest
import torch

from bondgrad import BlackBox, Central, Forward, Simultaneous
from bondgrad.evaluators import Local
from bondgrad.policies import Fixed
from tests.helpers import close, gradient, noisy

D, K = 4, 6
DRAWN = torch.randn(D + 1, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def waves(x):
    weight, phase = DRAWN[:-1].to(x), DRAWN[-1].to(x)
    return torch.sin(x @ weight + 3 * phase)


def cubes(x):
    return x**3 / 6


def rough(x):
    """Noise that is the same each time."""
    return waves(x) + 1e-4 * torch.sin(1e6 * x.sum(1, keepdim=True))


def exact_gradient(fn, x, gy):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(fn(x), x, gy)[0]


def problems(n, rows=32, d=D, k=K, dtype=torch.float64, seed=1):
    random = torch.Generator().manual_seed(seed)
    for _ in range(n):
        x, gy = (torch.randn(rows, width, dtype=torch.float64, generator=random) for width in (d, k))
        yield x.to(dtype), gy.to(dtype)


def layer_of(fn, d=D, k=K, **settings):
    return BlackBox(fn, d, k, **({"policy": "calibrated", "seed": 0} | settings))


def trained(layer, n=200, **kind):
    """The layer after n steps."""
    kind = {"d": layer.in_features, "k": layer.out_features} | kind
    for x, gy in problems(n, **kind):
        gradient(layer, x, gy)
    return layer


def check_state(layer):
    state = layer.policy_state
    assert all(torch.isfinite(buffer).all() for buffer in state.buffers())
    assert (state.step > 0).all()
    assert math.isfinite(state.schedule.noise)


def signs_right(g, exact):
    return float((g.sign() == exact.sign()).float().mean())


# ---- the best steps


def errors_at(steps, fn, sigma, estimator):
    """The rms error of slopes at each of these steps, [n, d], relative to each row's, but for those with hardly any."""
    (x, gy), *_ = problems(1, rows=300, k=fn(torch.zeros(1, D)).shape[1], seed=2)
    exact, errors = exact_gradient(fn, x, gy), []
    for step in steps:
        layer = layer_of(noisy(fn, sigma), k=gy.shape[1], policy=Fixed(float(step)), estimator=estimator)
        g, expected = gradient(layer, x, gy), exact
        if estimator == "simultaneous":
            along = layer.trace.last.sign[0].sign()
            expected = (exact * along).sum(1, keepdim=True) * along
        errors.append(((g - expected).square() / (expected**2 + 1e-3 * (expected**2).mean(0))).mean(0).sqrt())
    return torch.stack(errors)


@pytest.mark.parametrize("sigma", [1e-6, 1e-2])
@pytest.mark.parametrize("estimator", ["central", "forward"])
@pytest.mark.parametrize("fn", [waves, cubes])
def test_steps_are_nearly_the_best(fn, estimator, sigma):
    layer = trained(layer_of(noisy(fn, sigma), k=D if fn is cubes else K, estimator=estimator), 600)
    h = layer.policy_state.step
    grid = torch.logspace(-3, 3, 25, base=2) * h.median()
    best = grid[errors_at(grid, fn, sigma, estimator).argmin(0)]
    off = (h / best).log2().abs()  # from round to round steps go up and down by a factor of two or so
    assert off.max() < 1.75
    assert off.mean() < 0.75


@pytest.mark.parametrize("sigma", [1e-6, 1e-2])
def test_nearly_the_best_in_random_directions(sigma):
    layer = trained(layer_of(noisy(waves, sigma), estimator="simultaneous"), 400)
    check_state(layer)
    h = layer.policy_state.step
    grid = torch.cat((h.mean()[None], torch.logspace(-3, 3, 13, base=2) * h.mean()))
    errors = errors_at(grid, waves, sigma, "simultaneous").square().mean(1).sqrt()
    assert errors[0] < 1.4 * errors.min()


def test_the_steps_follow_the_noise():
    class Box:
        sigma, generator = 1e-5, torch.Generator().manual_seed(0)

        def __call__(self, x):
            y = waves(x)
            return y + self.sigma * torch.randn(y.shape, generator=self.generator, dtype=y.dtype)

    box = Box()
    layer = trained(layer_of(box))
    before = layer.policy_state.step.clone()
    box.sigma = 1e-3
    with pytest.warns(UserWarning, match="noise on the box's outputs grew"):
        trained(layer, 1200, rows=16)
    assert (layer.policy_state.step / before).log2().mean() > 1.5  # where 100 times the noise makes it 2.2


def test_quantised_outputs_get_steps_that_are_long_enough():
    def fn(x):
        return waves(x).mul(100).round().div(100)

    (x, gy), *_ = problems(1, rows=300, seed=2)
    exact = exact_gradient(waves, x, gy)
    accuracy = {}
    for policy in ("bond", "calibrated"):
        layer = trained(layer_of(fn, policy=policy), 100)
        accuracy[policy] = signs_right(gradient(layer, x, gy), exact)
    assert accuracy["bond"] < 0.7
    assert accuracy["calibrated"] > 0.95


# ---- units


@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
@pytest.mark.parametrize(
    ("loss", "y_unit", "x_unit"),
    [(20, 0, 0), (-20, 0, 0), (0, 13, 0), (0, -13, 0), (0, 80, 0), (0, -80, 0), (0, 0, 10), (0, 0, -10)],
)
def test_units_do_not_matter(loss, y_unit, x_unit, estimator):
    def steps(loss, y_unit, x_unit):
        layer = layer_of(noisy(lambda x: waves(x / x_unit), 1e-4), estimator=estimator)
        scaled = layer_of(lambda x: layer.fn(x) * y_unit, estimator=estimator)
        for x, gy in problems(40):
            gradient(scaled, x * x_unit, gy * loss)
        return scaled.policy_state.step / x_unit

    assert torch.allclose(steps(2.0**loss, 2.0**y_unit, 2.0**x_unit), steps(1, 1, 1), rtol=1e-6, atol=0)


def test_nor_do_they_where_rows_are_alike():
    def steps(x_unit):
        layer = layer_of(noisy(lambda x: waves(x / x_unit), 1e-4))
        for _, gy in problems(40):
            gradient(layer, torch.full((len(gy), D), 0.3 * x_unit).double(), gy)
        return layer.policy_state.step / x_unit

    assert torch.allclose(steps(2.0**-21), steps(1), rtol=1e-6, atol=0)


def test_a_loss_may_shrink_in_training():
    plain, scaled = layer_of(noisy(waves, 1e-4)), layer_of(noisy(waves, 1e-4))
    for i, (x, gy) in enumerate(problems(40)):
        gradient(plain, x, gy)
        gradient(scaled, x, gy * 2.0**-i)
    assert torch.allclose(scaled.policy_state.step, plain.policy_state.step, rtol=1e-6, atol=0)


@pytest.mark.parametrize("loss", [1e-30, 1e30])
def test_nor_does_a_loss_of_odd_size(loss):
    plain, scaled = layer_of(noisy(waves, 1e-4)), layer_of(noisy(waves, 1e-4))
    for x, gy in problems(40, dtype=torch.float32):
        gradient(plain, x, gy)
        gradient(scaled, x, gy * loss)
    check_state(scaled)
    assert torch.allclose(scaled.policy_state.step, plain.policy_state.step, rtol=0.05)


@pytest.mark.parametrize("sigma", [0, 1e-2])
def test_inputs_far_from_zero(sigma):
    """Their spread, not their size, is what steps go by."""
    far = layer_of(noisy(lambda x: waves(x - 1000), sigma))
    for x, gy in problems(100):
        g = gradient(far, x + 1000, gy)
    assert signs_right(g, exact_gradient(waves, x, gy)) > 0.97


# ---- limits and failures


@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
@pytest.mark.parametrize("settings", [{}, {"policy": "bond", "noise": "auto"}], ids=["calibrated", "auto"])
def test_no_point_outside_is_evaluated(estimator, settings):
    low, high = torch.tensor([-1.0, -0.125, 0, 0.5]), torch.tensor([1.0, 0.125, 3, 0.625])
    seen = []

    def fn(x):
        seen.append(x)
        return waves(x)

    layer = trained(layer_of(noisy(fn, 1e-2), estimator=estimator, limits=(low, high), **settings), 30)
    seen = torch.cat(seen)
    assert (seen >= low.double()).all()
    assert (seen <= high.double()).all()
    assert (seen[:, 1] == 0.125).any()  # tempted
    if not settings:
        check_state(layer)


def test_steps_fit_into_limits_far_from_zero():
    layer = trained(layer_of(noisy(waves, 1e-2), limits=(10, 10.25)), 1)
    assert 0.01 < layer.policy_state.step.max() < 0.1


def test_no_step_is_longer_than_the_limits_are_wide():
    layer = trained(layer_of(noisy(lambda x: x @ DRAWN[:-1], 0.01), limits=(-0.1, 0.1)), 1000)
    assert layer.policy_state.step.max() <= 1.5 * 0.2 / 4 * 1.001  # most of which fit between them


def test_trials_that_fail_are_no_reason_to_raise():
    failed = []

    def fn(x):
        outside = (x > 1).any(1, keepdim=True)
        failed.append(int(outside.sum()))
        return torch.where(outside, math.nan, torch.sin(3 * x + torch.arange(D)))

    layer = layer_of(noisy(fn, 1e-4), k=D, on_failure="raise")
    for x, gy in problems(30, k=D):
        gradient(layer, 0.75 - 0.1 * x.abs(), gy)
    assert sum(failed) > 0
    assert layer.stats.failures == 0
    check_state(layer)


def test_half_the_space_may_fail():
    def fn(x):
        return torch.where(x[:, :1] > 0.5, math.nan, noisy_waves(x))

    noisy_waves, layer = noisy(waves, 1e-3), layer_of(fn, evaluator=Local(retries=0))
    with pytest.warns(UserWarning, match="no finite output"):
        trained(layer, 100)
    check_state(layer)
    (x, gy), *_ = problems(1, seed=2)
    x[:, 0] = -x[:, 0].abs() - 1
    assert close(gradient(layer, x, gy), exact_gradient(waves, x, gy), 0.05)


@pytest.mark.parametrize("estimator", ["central", "forward"])
def test_failures_are_not_taken_for_noise(estimator):
    noise = {0.5: 1.0, math.inf: 1.0}  # the geometric mean over seeds, since a few trials say little
    for limit, seed in itertools.product(noise, range(4)):
        noisy_waves = noisy(waves, 1e-3, seed)

        def fn(x, noisy_waves=noisy_waves, limit=limit):
            return torch.where((x > limit).any(1, keepdim=True), math.nan, noisy_waves(x))

        layer = layer_of(fn, estimator=estimator, seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that some failed
            for x, gy in problems(100, seed=1 + seed):
                gradient(layer, 0.5 - x.abs(), gy)
        check_state(layer)
        noise[limit] *= float(layer.policy_state.noise.sqrt() * layer.policy_state.unit) ** 0.25
    assert 1 / 1.15 < noise[0.5] / noise[math.inf] < 1.15
    assert 1 / 1.5 < noise[math.inf] / (1e-3 * math.sqrt(0.5 if estimator == "central" else 2)) < 1.5


# ---- costs


@pytest.mark.parametrize(
    ("rows", "steps", "estimator"),
    [
        (64, 400, Central()),
        (64, 400, Forward()),
        (64, 400, Simultaneous(2)),
        (16, 800, Central()),
        (3, 1000, Central()),
        (1, 1000, Central()),
    ],
)
def test_trials_cost_little(rows, steps, estimator):
    layer = layer_of(lambda x: torch.sin(x), d=2, k=2, estimator=estimator)
    trained(layer, steps, rows=rows)
    usual = (1 + estimator.evaluations(2)) * rows * steps
    extra = layer.stats.evaluations - usual
    assert 0 < extra < 0.05 * layer.stats.evaluations
    assert layer.policy_state.schedule.trials > 5


def test_measuring_the_noise_costs_less():
    layer = trained(layer_of(waves, policy="bond", noise="auto"), 500, rows=64)
    extra = layer.stats.evaluations - (1 + 2 * D) * 64 * 500
    assert 0 < extra < 0.02 * layer.stats.evaluations
    assert trained(layer_of(waves, policy="bond", noise=1e-3), 10).stats.evaluations == (1 + 2 * D) * 32 * 10
