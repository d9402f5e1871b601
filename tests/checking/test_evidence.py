"""Evidence that is hard to weigh: gradients that are not finite, weak inputs, kinks, poles, decades, few digits."""

import math

import pytest
import torch
from torch import nn

from bondgrad import check
from bondgrad.checking._evidence import compare
from bondgrad.checking._slopes import SlopeSamples
from bondgrad.testing.boxes import TanhNetwork, Waves
from tests.checking.test_check import DTYPES, by_hand, only, rows
from tests.helpers import noisy, root


def scaled(box, factor, which=slice(None)):
    """A function with autograd's gradient, times a factor for some inputs."""

    def fn(x):
        factors = torch.ones_like(x[0])
        factors[which] = factor
        return box(factors * x + (1 - factors) * x.detach())

    return fn


# ---- gradients that are not finite


def spoilt(box, where, value=math.nan):
    """The gradient with a value at some entries: where(x, g) -> bool [N, d]."""

    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return box(x)

        @staticmethod
        def backward(ctx, gy):
            (x,) = ctx.saved_tensors
            g = box.vjp(x, gy)
            return torch.where(where(x, g), value, g)

    return Spoilt.apply


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "where",
    [
        lambda x, g: x[:, :1] > 1,  # some rows
        lambda x, g: torch.rand(g.shape) < 0.1,  # some copies
        lambda x, g: torch.arange(3) == 1,  # some inputs
        lambda x, g: torch.ones_like(g, dtype=torch.bool),
    ],
    ids=["rows", "copies", "inputs", "all"],
)
def test_a_gradient_that_is_not_finite_is_wrong(where, value):
    found = check(spoilt(Waves(3), where, value), rows(3))
    assert found.verdict == "wrong"
    assert all("not finite where the box is" in problem for problem in found.problems)


@pytest.mark.parametrize("n", [32, 200])
def test_one_row_among_many_without_a_finite_gradient(n):
    x = rows(3, n)
    for row in (0, n // 2, n - 1):
        found = check(spoilt(Waves(3), lambda x, g, bad=x[row, 0]: (x == bad).any(1, keepdim=True)), x)
        assert found.verdict == "wrong"


def test_the_gradient_of_a_norm_at_zero():
    """A mistake that many make: the root has no slope there, and zero times infinity is NaN."""
    x = torch.cat((rows(3, 20), torch.zeros(1, 3)))
    assert check(lambda x: x.square().sum(1, keepdim=True).sqrt(), x).verdict == "wrong"
    assert check(lambda x: x.norm(dim=1, keepdim=True), x)  # torch knows better


def test_the_end_of_a_domain_is_no_mistake():
    x = rows(3).abs()
    x[0] = 0  # where the slope of the root is infinite, and so is its gradient
    assert check(root, x)


# ---- weak inputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weak", [1e-2, 1e-3])
@pytest.mark.parametrize("factor", [0, -1, 2])
def test_a_weak_input_is_judged_by_its_own_slope(weak, factor, dtype):
    size = torch.tensor([1, 1, weak, 1], dtype=dtype)

    def box(x):
        return torch.sin(size * x).sum(1, keepdim=True)

    x = rows(4, dtype=dtype)
    found = check(scaled(box, factor, 2), x)
    assert found.verdict == "wrong"
    assert len(found.problems) == 1
    assert found.problems[0].startswith("input 2: ")
    assert check(box, x)


def test_a_very_weak_input():
    size = torch.tensor([1, 1e-6, 1], dtype=torch.float64)
    box = lambda x: torch.sin(size * x).sum(1, keepdim=True)  # noqa: E731
    assert check(scaled(box, 0, 1), rows(3)).verdict == "wrong"
    assert check(box, rows(3))


def test_what_cannot_be_seen_of_a_weak_input_is_said():
    size = torch.tensor([1, 1e-4, 1], dtype=torch.float64)
    box = noisy(lambda x: (x * size).sum(1, keepdim=True), 1e-4)
    found = check(scaled(box, 0, 1), rows(3))
    assert found.verdict != "wrong"  # its effect is hardly that of the noise
    assert found.factor[1].isnan() or found.visible[1] > 0.5
    assert "too weak" in str(found) or found.verdict == "undecided"


# ---- no false alarms, and yet no mistake gets through


def relu_network(seed, dtype):
    torch.manual_seed(seed)
    layers = nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2)
    return nn.Sequential(*layers).to(dtype)


def mixed(fn):
    """Of inputs mixed at random."""

    def make(seed, dtype):
        mix = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
        return lambda x: fn(x @ mix)

    return make


def plain(fn):
    return lambda seed, dtype: fn


HARD = {
    "relu": relu_network,
    "sort": mixed(lambda z: z.sort(1).values),
    "abs": mixed(torch.abs),
    "max": mixed(lambda z: z.amax(1, keepdim=True)),
    "folded": mixed(lambda z: torch.sin(z).abs()),
    "exp": plain(lambda x: torch.exp(3 * x)),
    "ten": plain(lambda x: 10**x),
    "inverse": plain(lambda x: 1 / x),
    "pole": plain(lambda x: x**-3),
    "tan": plain(torch.tan),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HARD)
def test_kinks_poles_and_decades(name, dtype):
    verdicts = []
    for seed in range(6):
        box, x = HARD[name](seed, dtype), (3 if name == "pole" else 1) * rows(6, dtype=dtype, seed=seed)
        verdicts.append(check(box, x, seed=seed).verdict)
        assert check(scaled(box, -1, 2), x, seed=seed).verdict == "wrong"
        assert check(scaled(box, 1.1), x, seed=seed).verdict == "wrong"
    assert "wrong" not in verdicts
    assert verdicts.count("right") >= (3 if name == "pole" else 5)


@pytest.mark.parametrize("noise", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("name", ["exp", "ten", "inverse", "pole"])
def test_noise_on_outputs_that_span_decades(name, noise):
    for seed in range(5):
        for dtype in DTYPES:
            box = HARD[name](seed, dtype)
            x = rows(3, dtype=dtype, seed=seed)
            assert check(noisy(box, noise, seed), x, seed=seed).verdict != "wrong"


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_half_precision_inside(low):
    """The answers come in float32, but there are few of them."""
    for seed in range(5):
        mix = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        box = lambda x, mix=mix: torch.tanh((x.to(low) @ mix.to(low)).float())  # noqa: E731
        x = rows(5, dtype=torch.float32, seed=seed)
        assert check(box, x, seed=seed).verdict != "wrong"
        assert check(scaled(box, -1), x, seed=seed).verdict == "wrong"


def test_a_confirmed_mistake_has_a_name():
    found = check(by_hand(TanhNetwork(), only(1, 1.1)), rows(4))
    assert found.problems == ("input 1: 10.0 % too large",)


@pytest.mark.parametrize("seed", range(4))
def test_kinks_and_noise_together_are_no_reason_to_accuse(seed):
    """Steps long enough for the noise lead over kinks, and what they see there is not the gradient."""
    torch.manual_seed(7000 + seed)
    network = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4)).requires_grad_(False)
    x, random = torch.randn(64, 6), torch.Generator().manual_seed(seed)
    half_width = 0.01 * float(network(x).std())

    def answer(sign):
        def box(x):
            turned = torch.cat((sign * x[:, :1] + (1 - sign) * x[:, :1].detach(), x[:, 1:]), 1)
            y = network(turned)
            return y + half_width * torch.rand(y.shape, generator=random)

        return check(box, x, seed=seed, budget=50_000)

    assert answer(1).verdict != "wrong"
    assert answer(-1).problems == ("input 0: wrong sign",)


# ---- the comparison, by numbers


def compared(g, s, noise_s=0.0, noise_g=0.0, change=0.0, kink=0.0, rounding=0.0, loss_noise=0.0, tolerance=0.01):
    """Of gradients g [r, d] with slopes s, each in four copies that are off by plus and minus so much."""
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)[:, None, None]
    g, s = (torch.as_tensor(t, dtype=torch.float64) for t in (g, s))
    kink, change, rounding = (torch.as_tensor(t, dtype=torch.float64).expand_as(s) for t in (kink, change, rounding))
    four, step = torch.ones_like(sign), torch.ones_like(s)
    loss = torch.zeros_like(s) + loss_noise * sign
    samples = SlopeSamples(s + noise_s * sign, four * change, four * kink, loss, step, rounding)
    return compare(g + noise_g * sign, samples, torch.zeros_like(s).bool(), tolerance)


S = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)


def test_factors_and_errors_of_exact_slopes():
    """The second input is off by a tenth: by 0.1 · (4 + 16) of the 30 that the squares of all slopes are."""
    found = compared(S * torch.tensor([1, 1.1]), S)
    assert found.factor.tolist() == pytest.approx([1, 1.1, 1 + 2 / 30])
    assert found.standard_error.tolist() == [0, 0, 0]
    assert found.error.tolist() == pytest.approx([0, 0.1])
    assert found.unexplained.tolist() == pytest.approx([0, 0], abs=1e-7)
    assert found.visible.tolist() == pytest.approx([0.01, 0.01])
    assert found.wrong.tolist() == [False, True, True]
    assert found.uniform.tolist() == [False, True, True]
    assert found.enough.all()
    assert not found.missing.any()
    assert not found.bending.any()


@pytest.mark.parametrize("tolerance", [0.01, 0.1])
@pytest.mark.parametrize("sign", [-1, 1])
def test_what_is_tolerated(tolerance, sign):
    for part, wrong in ((0.99, False), (1.01, True)):
        found = compared((1 + sign * part * tolerance) * S, S, tolerance=tolerance)
        assert found.wrong.tolist() == [wrong] * 3
        # An error that no factor explains, of the same size.
        mixed = compared(S + sign * part * tolerance * torch.tensor([[3, 4], [-1, -2]]), S, tolerance=tolerance)
        assert mixed.factor.tolist() == pytest.approx([1, 1, 1])
        assert mixed.error.tolist() == pytest.approx([part * tolerance] * 2)
        assert mixed.unexplained.tolist() == pytest.approx([part * tolerance] * 2)
        assert mixed.wrong.tolist() == [wrong, wrong, False]
        assert mixed.uniform.tolist() == [False] * 3


def test_the_noise_of_slopes_is_taken_off():
    """Four copies that are off by 0.3 have a mean with a variance of 0.03, by which squares are too large."""
    found = compared([[10.0]], [[10.0]], noise_s=0.3)
    assert float(found.factor[0]) == pytest.approx(100 / 99.97)
    assert float(found.standard_error[0]) == pytest.approx(math.sqrt(100 * 0.03 + 0.03**2 * (2 + 2 / 3)) / 99.97)
    assert float(found.error[0]) == 0
    both = compared([[11.0]], [[10.0]], noise_s=0.3, noise_g=0.6)  # with variances of 0.03 and 0.12
    variance = 100 * 0.15 + 0.03 * (0.03 * (2 + 2 / 3) + 0.12)
    assert float(both.standard_error[0]) == pytest.approx(math.sqrt(variance) / 99.97)
    assert float(both.error[0]) == pytest.approx(math.sqrt((1 - 0.15) / 99.97))
    assert float(both.factor[0]) == pytest.approx(1 + 10.03 / 99.97)


@pytest.mark.parametrize(("s", "clear"), [(0.8825, False), (0.8835, True)])
def test_a_slope_is_seen_if_its_square_is_26_times_its_variance(s, clear):
    """25 times, after the variance of 0.03 is taken off: 0.883² = 26 · 0.03."""
    found = compared([[s]], [[s]], noise_s=0.3, loss_noise=0.3)
    assert bool(found.factor[0].isnan()) is not clear
    assert math.isfinite(found.standard_error[0]) is clear


def test_noise_hides_errors_and_rows_make_up_for_it():
    few, many = (compared([[1.0]] * r, [[1.0]] * r, noise_s=1e-3) for r in (4, 64))
    assert 0.01 < float(few.visible[0]) < 0.015
    assert 0.01 < float(many.visible[0]) < float(few.visible[0])
    noisy = compared([[1.0]] * 16, [[1.0]] * 16, noise_s=0.05)
    assert float(noisy.visible[0]) > 0.03
    assert not noisy.enough.any()
    assert not noisy.bending.any()  # for noise, shorter steps are no remedy


def test_a_weak_slope_that_is_not_seen_counts_by_a_hundredth_of_the_typical():
    """Slopes of 1 and of nothing, and a gradient that is off by a part of the root mean square, 0.01 · √½."""
    unit = 0.01 * math.sqrt(0.5)
    s = torch.tensor([[1.0, 0.0]] * 4)
    for part, wrong in ((0.99, False), (1.01, True)):
        found = compared(s + torch.tensor([0, 0.01 * part * unit]), s)
        assert found.factor[1].isnan()
        assert float(found.error[1]) == pytest.approx(0.01 * part)
        assert found.wrong.tolist() == [False, wrong, False]


# ---- entries that are left out


def test_kinks_are_left_out():
    """One row of four is wrong, but has a kink there; what is less than the tolerance is none."""
    s = torch.ones(4, 1)
    g, kink = s.clone(), torch.zeros(4, 1)
    g[1] = 5
    kink[1] = 0.011
    found = compared(g, s, kink=kink)
    assert found.entries.at_kink.flatten().tolist() == [False, True, False, False]
    assert found.entries.known.flatten().tolist() == [True, False, True, True]
    assert not found.wrong.any()
    assert compared(g, s, kink=kink * 0.9).wrong.any()


@pytest.mark.parametrize(("kink", "seen"), [(4.7, False), (4.9, True)])
def test_kinks_stand_out_of_the_noise_by_four_standard_deviations(kink, seen):
    """That of rounding, 4.5 times as much in a slope and four times that in a kink: 18 · 1/15 = 1.2 in each."""
    s = torch.full((2, 1), 100.0)
    found = compared(s, s, kink=torch.tensor([[kink], [0.0]]), rounding=1 / 15)
    assert found.entries.at_kink.flatten().tolist() == [seen, False]


def test_rows_with_more_rounding_than_most_are_left_out():
    """Where it matters: the square of the tolerance, over thirty, of the squares of all slopes."""
    s, rounding = torch.ones(5, 1), torch.tensor([[1.0], [1.0], [1.0], [1.0], [2.0]]) / 4.5
    least = math.sqrt(1e-4 * 5 / 30) / 2  # at the last row
    for part, known in ((0.99, True), (1.01, False)):
        found = compared(s, s, rounding=part * least * rounding)
        assert found.entries.known.flatten().tolist() == [True] * 4 + [known]


@pytest.mark.parametrize(("noise", "aliased"), [(0.172, False), (0.174, True)])
def test_slopes_that_scatter_more_than_the_loss_say_nothing(noise, aliased):
    """Four times the variance of the mean, noise² / 3, is a hundredth of the square of slopes from 0.0866 on."""
    found = compared([[2.0]] * 3, [[2.0]] * 3, noise_s=noise)
    assert bool(found.entries.known.all()) is not aliased
    assert bool(found.bending[0]) is aliased
    assert math.isinf(found.visible[0]) is aliased
    calm = compared([[2.0]] * 3, [[2.0]] * 3, noise_s=noise, loss_noise=noise)  # as the loss does at one point
    assert calm.entries.known.all()


def test_what_extrapolation_leaves_is_allowed_for():
    """A quarter of the change between two steps: an error of so much is no mistake, but calls for shorter steps."""
    s = torch.ones(4, 1)
    for error, wrong in ((0.059, False), (0.061, True)):
        found = compared((1 + error) * s, s, change=0.2)
        assert found.wrong[0] == wrong
        assert found.bending[0]
    assert float(found.visible[0]) == pytest.approx(0.06)
    assert not compared(s, s, change=0.0099).bending[0]  # less than a quarter of the tolerance
    assert compared(s, s, change=0.0101).bending[0]


def test_gradients_that_are_missing():
    g = torch.ones(4, 3)
    s = g.clone()
    g[2, 1] = math.inf
    g[0, 2], s[0, 2] = math.inf, math.nan  # where the box has no slope either
    found = compared(g, s)
    assert found.missing.tolist() == [False, True, False]
    assert found.wrong.tolist() == [False, True, False, False]
