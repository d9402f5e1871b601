"""The policies' formulas, against the numbers written out by hand."""

import math

import pytest
import torch

from bondgrad import policies
from bondgrad.policies import Batch, Bond, Differences, Fixed, Gaussian, Observation, Optimal, Steps

B = 1.19e-7


def drawn(policy, state, x, n=1, noise=B):
    """The policy's steps for rows x."""
    return policy.steps(state, Batch(x, torch.Generator().manual_seed(0), len(x)), n, noise)


def learnt(policy, state, g, steps):
    """The state once the policy has seen one more gradient g [B, d]."""
    summary = policy.summarize(state, Observation(torch.zeros_like(g), g, steps, Differences()))
    return policy.observe(state, summary, len(g), Differences())


def after(policy, *gradients):
    """The state once the policy has seen these gradients, each [B, d]."""
    state = policy.init(gradients[0].shape[1])
    for g in gradients:
        state = learnt(policy, state, g, drawn(policy, state, torch.ones_like(g)))
    return state


def test_fixed_has_one_size_and_random_signs():
    steps = drawn(Fixed(0.5), {}, torch.zeros(100, 3), n=2)
    assert steps.size.shape == steps.sign.shape == (2, 100, 3)
    assert (steps.size == 0.5).all()
    assert 0.4 < (steps.sign > 0).float().mean() < 0.6


def test_gaussian_has_the_given_deviation():
    steps = drawn(Gaussian(0.2), {}, torch.zeros(5000, 3))
    z = torch.copysign(steps.size, steps.sign)
    assert abs(z.mean()) < 0.01
    assert math.isclose(z.std(), 0.2, rel_tol=0.02)


def test_gaussian_steps_have_no_bounds():
    steps = drawn(Gaussian(0.2), {}, torch.zeros(1, 3))
    assert steps.lower.tolist() == [0, 0, 0]
    assert steps.upper.tolist() == [math.inf] * 3


def test_the_step_of_optimal_in_numbers():
    assert float(drawn(Optimal(9e-6, 1e3), {}, torch.zeros(1, 1)).size) == pytest.approx(3e-3)


def test_a_process_draws_the_numbers_of_all_and_uses_its_own():
    x = torch.zeros(5, 3)

    def numbers(draw, rows, first):
        return draw(Batch(x[rows], torch.Generator().manual_seed(0), 5, first))

    for draw in (lambda batch: batch.uniform(2), lambda batch: batch.normal(2, 0.5)):
        whole, ours = numbers(draw, slice(5), 0), numbers(draw, slice(1, 3), 1)
        assert torch.equal(ours, whole[:, 1:3])
    uniform = Batch(torch.zeros(1000, 3), torch.Generator().manual_seed(0), 1000).uniform(1)
    assert uniform.min() < -0.99
    assert uniform.max() > 0.99
    assert uniform.abs().max() <= 1


def test_a_policy_shows_its_settings():
    assert repr(Bond()) == "Bond(bounds='bond', reduce='mean-abs', betas=(0.9, 0.999), eta=0.001, max_step=None)"
    assert repr(Optimal(1e-6, 2)) == "Optimal(noise=1e-06, third_derivative=2.0)"


@pytest.mark.parametrize("betas", [(0.9, 1), (-0.1, 0.9), (0.9,), (0.9, 0.9, 0.9), 0.9])
def test_decays_are_two_numbers_from_zero_to_less_than_one(betas):
    with pytest.raises(ValueError, match=r"betas must be two numbers in \[0, 1\)"):
        Bond(betas=betas)
    assert Bond(betas=[0, 0.5]).betas == (0.0, 0.5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bounds": "adagrad"}, "bounds must be one of .*'max-v'"),
        ({"reduce": "median"}, "reduce must be one of .*'mean-abs'"),
        ({"max_step": 0}, "max_step must be"),
        ({"max_step": -math.inf}, "max_step must be"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Bond(**settings)


def test_optimal_balances_truncation_and_noise():
    noise, third = 1e-6, 5.0
    step = float(drawn(Optimal(noise, third), {}, torch.zeros(1, 1)).size)

    def bound(h):
        return third / 6 * h**2 + noise / h

    assert bound(step) < min(bound(step * 1.05), bound(step / 1.05))


# ---- BOND


def test_the_first_step_is_normal_and_at_least_the_noise():
    policy = Bond(max_step=math.inf)
    steps = drawn(policy, policy.init(4), torch.ones(20000, 4))
    z = torch.copysign(steps.size, steps.sign)
    assert steps.size.min() >= B
    assert math.isclose(z.std(), math.sqrt(B), rel_tol=0.02)
    # A normal distribution: 68.3 % within one deviation, 99.7 % within three.
    assert math.isclose((z.abs() < math.sqrt(B)).float().mean(), 0.683, abs_tol=0.01)
    assert math.isclose((z.abs() < 3 * math.sqrt(B)).float().mean(), 0.9973, abs_tol=0.002)


def test_the_first_step_is_finite_even_if_the_random_number_is_one():
    x = torch.ones(2000, 4, dtype=torch.bfloat16)  # of which one number in 128 is
    steps = drawn(Bond(max_step=math.inf), Bond().init(4), x)
    assert (steps.sign == -1).any()
    assert torch.isfinite(steps.size).all()


@pytest.mark.parametrize("reduce", ["sum", "mean", "mean-abs"])
def test_the_moments_are_adams(reduce):
    policy = Bond(reduce=reduce, betas=(0.8, 0.95))
    gradients = torch.randn(7, 16, 3, generator=torch.Generator().manual_seed(0))
    parameter = torch.zeros(3, requires_grad=True)
    adam = torch.optim.Adam([parameter], betas=(0.8, 0.95))
    for g in gradients:
        parameter.grad = {"sum": g.sum(0), "mean": g.mean(0), "mean-abs": g.abs().mean(0)}[reduce]
        adam.step()
    moments = adam.state[parameter]
    m, v = moments["exp_avg"] / (1 - 0.8**7), moments["exp_avg_sq"] / (1 - 0.95**7)
    sums, weights = after(policy, *gradients)["sums"]
    assert torch.allclose(sums[0] / weights[0], m, rtol=1e-4)
    assert torch.allclose(sums[1] / weights[1], v, rtol=1e-4)


def test_the_bounds_of_every_name():
    g = torch.tensor([[0.5, -0.02, 1.5]])
    h = torch.tensor([[0.1, -0.04, 2.5]])
    m = (0.9 * g + h) / 1.9  # the bias-corrected moments of two steps
    v = (0.999 * g**2 + h**2) / 1.999
    m, v = m[0].abs(), v[0]
    lower, upper = B / m.min(), m.max() * (m / v).sqrt()
    expected = {
        "bond": (lower, upper),
        "sqrt6": (B / m, math.sqrt(6) * upper),
        "adam": (lower, 1e-3 * m / v.sqrt()),
        "max-v": (lower, m.max() * (m / v.max()).sqrt()),
    }
    for name, (low, high) in expected.items():
        policy = Bond(name, reduce="mean", max_step=math.inf)
        steps = drawn(policy, after(policy, g, h), torch.ones(1, 3))
        assert torch.allclose(steps.lower, low.expand(3), rtol=1e-5), name
        assert torch.allclose(steps.upper, high, rtol=1e-5), name


def test_the_bounds_with_error_terms():
    policy = Bond("error-terms", reduce="mean", max_step=math.inf)
    g = torch.tensor([[0.5, -0.02, 1.5]])
    state = after(policy, g)
    step = 3e-4
    state["last"][1] = step
    noise = 1e-9
    steps = drawn(policy, state, torch.ones(1, 3), noise=noise)
    m, v = g[0].abs().double(), g[0].double() ** 2  # after one step, and a = |m̂ - g| = 0
    error = v / 6 * step**2 + noise / step
    crossing = (6 * noise / v) ** (1 / 3)
    lower = noise / (m - error - v / 6 * crossing**2)
    upper = (6 / v * (m - error - noise / crossing)).sqrt()
    assert torch.allclose(steps.lower.double(), lower, rtol=1e-4)
    assert torch.allclose(steps.upper.double(), upper, rtol=1e-4)


def test_error_terms_without_a_solution_fall_back_on_the_simple_bounds():
    g = torch.tensor([[0.5, -0.02, 1.5]])
    simple, full = Bond("bond", reduce="mean", max_step=math.inf), Bond("error-terms", reduce="mean", max_step=math.inf)
    state = after(full, g)
    state["last"][1] = 1e-12  # so that b / Δ exceeds every gradient
    expected = drawn(simple, after(simple, g), torch.ones(1, 3))
    got = drawn(full, state, torch.ones(1, 3))
    assert torch.equal(got.lower, expected.lower.expand(3))
    assert torch.equal(got.upper, expected.upper)


def test_sizes_lie_between_the_bounds_whichever_is_larger():
    for scale in (1.0, 1e-5):  # with small gradients the lower bound exceeds the upper
        policy = Bond(max_step=math.inf)
        state = after(policy, scale * torch.tensor([[0.5, -0.2, 1.5]]))
        steps = drawn(policy, state, torch.ones(4000, 3))
        low, high = torch.minimum(steps.lower, steps.upper), torch.maximum(steps.lower, steps.upper)
        assert bool((steps.lower > steps.upper).all()) == (scale < 1)
        size = steps.size[0]
        assert (size >= low * (1 - 1e-6)).all()
        assert (size <= high * (1 + 1e-6)).all()
        assert torch.allclose(size.mean(0), (low + high) / 2, rtol=0.05)  # uniform
        assert 0.4 < (steps.sign > 0).float().mean() < 0.6


def test_steps_stay_within_reason():
    x = torch.tensor([[3.0, 0.0], [4.0, 0.0]])  # root mean squares 3.54 and 0
    best = torch.tensor([math.sqrt(12.5) * math.cbrt(3 * B), math.sqrt(B)])
    policy = Bond()
    long, short = (drawn(policy, after(policy, g * torch.ones(2, 2)), x).size[0] for g in (1e9, 1e-15))
    assert torch.allclose(long, best.expand(2, 2))
    assert torch.allclose(short, best.expand(2, 2))  # where the lower bound is enormous
    tiny = Bond("adam", eta=1e-30)
    sizes = drawn(tiny, after(tiny, 1e9 * torch.ones(2, 2)), x).size[0]
    assert torch.allclose(sizes, 0.01 * best.expand(2, 2))
    given = Bond(max_step=0.25)
    assert drawn(given, after(given, 1e9 * torch.ones(2, 2)), x).size.max() == 0.25


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, 1e30])
def test_what_is_zero_or_not_finite_never_enters_the_moments(bad):
    policy = Bond()
    g = torch.tensor([[0.5, -0.2, 1.5]])
    state = after(policy, g)
    worse = g.clone()
    worse[0, 1] = bad
    new = learnt(policy, state, worse, drawn(policy, state, g))
    assert torch.equal(new["sums"][..., 1], state["sums"][..., 1])
    assert not torch.equal(new["sums"][..., 0], state["sums"][..., 0])
    assert torch.isfinite(new["sums"]).all()


@pytest.mark.parametrize("bounds", ["bond", "max-v"])
def test_an_input_not_seen_does_not_disturb_the_others(bounds):
    policy = Bond(bounds, max_step=math.inf)
    both = drawn(policy, after(policy, torch.tensor([[0.25, 0.75]])), torch.ones(1, 2))
    one = drawn(policy, after(policy, torch.tensor([[0.25, 0.75, 0.0]])), torch.ones(1, 3))
    assert torch.equal(one.lower, both.lower)
    assert torch.equal(one.upper[:2], both.upper)
    assert one.size[0, 0, 2] >= B


def test_an_input_whose_gradients_cancel_counts_as_not_seen():
    policy = Bond(reduce="mean", max_step=math.inf)
    state = after(policy, torch.tensor([[1.0, 1.0]]), torch.tensor([[-0.9, 1.0]]))
    assert state["sums"][0, 0, 0] == 0  # as 0.9 · 1 - 0.9
    steps = drawn(policy, state, torch.ones(1, 2))
    assert float(steps.lower) == pytest.approx(B)
    assert steps.size[0, 0, 0] < 10 * math.sqrt(B)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_does_not_disturb_the_others(bad):
    policy = Bond()
    x = torch.ones(4, 2)
    x[1] = bad
    assert torch.isfinite(drawn(policy, after(policy, torch.ones(4, 2)), x).size).all()


def test_the_last_gradient_and_the_root_mean_square_of_its_steps_are_remembered_for_the_error_terms():
    policy = Bond("error-terms", reduce="mean")
    g = torch.tensor([[1.0, 2.0], [3.0, -6.0]])
    size = torch.tensor([[[1.0, 0.0], [1.0, 2.0]], [[7.0, 0.0], [7.0, 4.0]], [[5.0, 1.0], [5.0, 3.0]]])  # three draws
    state = learnt(policy, policy.init(2), g, Steps(size, size, g[0], g[0]))
    assert state["last"][0].tolist() == [2, -2]
    assert state["last"][1].tolist() == pytest.approx([5, math.sqrt(30 / 6)])


@pytest.mark.parametrize("size", [math.inf, math.nan])
def test_steps_that_are_not_finite_are_not_remembered(size):
    policy = Bond("error-terms")
    sizes = torch.tensor([[[size, 1.0]]])
    state = learnt(policy, policy.init(2), torch.ones(1, 2), Steps(sizes, sizes, sizes[0, 0], sizes[0, 0]))
    assert state["last"].tolist() == [[0, 1], [0, 1]]
    assert state["sums"][0, 0].tolist() == [0, 1]


def test_the_parts_of_a_batch_have_one_scale():
    policy = Bond("adam", eta=1e30)  # steps that are all too long
    state, x = after(policy, torch.ones(2, 1)), torch.tensor([[3.0], [4.0]])
    sums = policy.measure(x[:1]) + policy.measure(x[1:])
    part = policy.steps(state, Batch(x[:1], torch.Generator(), 2, 0, sums), 1, B)
    assert part.size.item() == pytest.approx(math.sqrt(12.5) * math.cbrt(3 * B))


def test_observe_returns_a_new_state():
    policy = Bond("error-terms")
    state = policy.init(2)
    copies = {name: value.clone() for name, value in state.items()}
    learnt(policy, state, torch.ones(3, 2), drawn(policy, state, torch.ones(3, 2)))
    assert all(torch.equal(state[name], copies[name]) for name in state)


def test_error_terms_by_hand():
    """m = 2, v = 3, g = 1.5, Δ = 0.1, b = 0.01: error 0.605, and truncation equals noise at a step of 0.02^(1/3)."""
    numbers = [torch.tensor([value], dtype=torch.float64) for value in (2.0, 3.0, 1.5, 0.1)]
    lower, upper = Bond("error-terms").error_terms(*numbers, 0.01)
    assert float(lower) == pytest.approx(0.011652848, rel=1e-6)
    assert float(upper) == pytest.approx(1.310084, rel=1e-6)


def test_former_names_are_known_for_a_while():
    with pytest.warns(DeprecationWarning, match="policies.StepTrial now"):
        assert policies.Trial is policies.StepTrial
    with pytest.warns(DeprecationWarning, match="policies.StartingPoint now"):
        assert policies.First is policies.StartingPoint
    with pytest.raises(AttributeError, match="no attribute 'Second'"):
        policies.Second  # noqa: B018
