"""Every estimator with every policy in every dtype; and proof that the suite can fail."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bondgrad.estimators import Central, Estimator, Evaluate, Forward, Simultaneous, Site
from bondgrad.policies import Batch, Bond, Calibrated, Fixed, Gaussian, Optimal
from bondgrad.testing import CHECKS, Subject, check_estimator, check_policy
from bondgrad.testing.boxes import Linear
from bondgrad.testing.conformance import (
    along,
    check_chunks,
    check_cost,
    check_failures,
    check_limits,
    check_order,
    check_parts,
    check_rate,
    check_seed,
    check_structure,
    check_value,
    relative_error,
    rescaled,
    slope,
)

ESTIMATORS = {
    "central": {"estimator": lambda n: Central(), "order": 2},
    "forward": {"estimator": lambda n: Forward(), "order": 1},
    "simultaneous": {"estimator": Simultaneous, "order": 2, "simultaneous": True},
}
POLICIES = {
    "bond": Bond,
    "bond-max-step": lambda: Bond(max_step=1e-3),
    "sqrt6": lambda: Bond("sqrt6"),
    "error-terms": lambda: Bond("error-terms"),
    "adam": lambda: Bond("adam"),
    "max-v": lambda: Bond("max-v"),
    "sum": lambda: Bond(reduce="sum"),
    "mean": lambda: Bond(reduce="mean"),
    "calibrated": Calibrated,
    "fixed": lambda: Fixed(1e-3),
    "gaussian": lambda: Gaussian(1e-3),
    "optimal": lambda: Optimal(1e-10, 1.0),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def says_something(estimator, dtype, check):
    """Orders are measured in float64 only, and rates of simultaneous estimators only."""
    if check is check_order:
        return dtype == "float64"
    return check is not check_rate or estimator == "simultaneous"


@pytest.mark.parametrize(
    ("estimator", "policy", "dtype", "check"),
    [
        pytest.param(estimator, policy, dtype, check, id=f"{estimator}-{policy}-{dtype}-{check.__name__}")
        for estimator in ESTIMATORS
        for policy in POLICIES
        for dtype in DTYPES
        for check in CHECKS
        if says_something(estimator, dtype, check)
    ],
)
def test_conformance(estimator, policy, dtype, check):
    check(Subject(policy=POLICIES[policy], dtype=DTYPES[dtype], **ESTIMATORS[estimator]))


@pytest.mark.parametrize("estimator", [Central(), Forward(), Simultaneous], ids=["central", "forward", "simultaneous"])
def test_all_of_it_in_one_call(estimator):
    check_estimator(estimator)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_in_parts(policy):
    if policy == "calibrated":
        check_policy(POLICIES[policy])
    else:
        check_parts(POLICIES[policy]())


@dataclass
class Damaged(Estimator):
    """An estimator with a mistake."""

    inner: Estimator
    mistake: str
    normalize_rows: bool = False

    @property
    def draws(self) -> int:
        return self.inner.draws

    @property
    def shared_base(self) -> bool:
        return self.inner.shared_base

    def evaluations(self, in_features: int) -> int:
        return self.inner.evaluations(in_features) + (self.mistake == "price")

    def vjp(self, site: Site, evaluate: Evaluate, max_rows: int) -> Tensor:
        if self.mistake == "step not divided by":  # some steps twice as long, unknown to the division
            site = site._replace(delta=torch.where(site.x > 0, 2 * site.delta, site.delta))
            return self.inner.vjp(site, evaluate, max_rows) * torch.where(site.x > 0, 2, 1)
        if self.mistake == "limits not kept":
            site = site._replace(low=None, high=None)
        if self.mistake == "failures not noticed":
            return self.inner.vjp(site, lambda points, rows: (evaluate(points, rows)[0], None), max_rows)
        if self.mistake == "stale base":
            site = site._replace(y=site.y.roll(1, 0))
        g = self.inner.vjp(site, evaluate, max_rows)
        return {
            "3 % off": lambda: g * 1.03,
            "sign": lambda: -g,
            "swapped inputs": lambda: g.roll(1, 1),
            "swapped rows": lambda: g.roll(1, 0),
            "one entry lost": lambda: g.index_fill(0, torch.tensor([0]), 0),
            "biased": lambda: g + site.delta[0].abs(),
            "global random numbers": lambda: g + 1e-9 * torch.randn_like(g),
            "portions": lambda: g * (1 + 1e-9 * max_rows),
            "stale base": lambda: g,
            "price": lambda: g,
            "limits not kept": lambda: g,
        }[self.mistake]()


MISTAKES = {
    "3 % off": check_value,
    "sign": check_value,
    "swapped inputs": check_value,
    "swapped rows": check_value,
    "one entry lost": check_value,
    "step not divided by": check_value,
    "biased": check_order,
    "global random numbers": check_seed,
    "portions": check_chunks,
    "price": check_cost,
    "limits not kept": check_limits,
    "failures not noticed": check_failures,
}


@pytest.mark.parametrize(
    ("estimator", "mistake"),
    [
        (estimator, mistake)
        for estimator in ESTIMATORS
        for mistake in MISTAKES
        # An error in proportion to the step is its own order, and with one end nothing is left to notice.
        if (estimator, mistake) not in (("forward", "biased"), ("forward", "failures not noticed"))
    ],
)
def test_mistakes_are_caught(estimator, mistake):
    settings = ESTIMATORS[estimator]
    wrong = settings | {"estimator": lambda n: Damaged(settings["estimator"](n), mistake)}
    with pytest.raises(AssertionError):
        MISTAKES[mistake](Subject(policy=lambda: Fixed(1e-3), dtype=torch.float64, **wrong))


def test_a_stale_base_is_caught():
    wrong = ESTIMATORS["forward"] | {"estimator": lambda n: Damaged(Forward(), "stale base")}
    with pytest.raises(AssertionError):
        check_value(Subject(policy=lambda: Fixed(1e-3), dtype=torch.float64, **wrong))


@dataclass
class Scaled(Estimator):
    """An estimator whose gradient is off by a factor: by another one in the first step."""

    inner: Estimator
    first: float
    later: float
    normalize_rows: bool = False
    steps: int = 0

    @property
    def shared_base(self) -> bool:
        return self.inner.shared_base

    def evaluations(self, groups: int) -> int:
        return self.inner.evaluations(groups)

    def vjp(self, site: Site, evaluate: Evaluate, max_rows: int) -> Tensor:
        self.steps += 1
        return self.inner.vjp(site, evaluate, max_rows) * (self.first if self.steps == 1 else self.later)


@pytest.mark.parametrize(("first", "later", "caught"), [(4, 0.8, False), (6, 0, True), (0, 1.2, True)])
@pytest.mark.parametrize(
    ("inner", "dtype", "tolerance"),
    [
        (Forward(), torch.float32, 0.1),
        (Central(), torch.float32, 0.05),
        (Forward(), torch.float64, 5e-3),
        (Central(), torch.float64, 5e-5),
    ],
)
def test_what_is_tolerated(inner, dtype, tolerance, first, later, caught):
    """Relative errors up to a tolerance; in the first step, where a policy may know nothing, five times as much."""
    wrong = Subject(
        lambda n: Scaled(inner, 1 + first * tolerance, 1 + later * tolerance),
        lambda: Fixed(1e-4 if dtype == torch.float64 else 1e-2),  # so that the error is that factor alone
        dtype,
        order=1 if inner.shared_base else 2,
    )
    if caught:
        with pytest.raises(AssertionError, match="relative error"):
            check_value(wrong)
    else:
        check_value(wrong)


def test_tolerances_are_those_of_the_second_order_for_higher_ones():
    subject = Subject(lambda n: Central(), lambda: Fixed(1e-3), torch.float64, order=4)
    assert subject.tolerance() == subject.tolerance(order=2) < subject.tolerance(order=1)


@pytest.mark.parametrize(("off", "caught"), [(0.1, False), (0.2, True), (-0.2, True)])
def test_orders_may_be_a_little_off(off, caught):
    subject = Subject(lambda n: Central(), lambda: Fixed(1e-3), torch.float64, order=2 + off)
    if caught:
        with pytest.raises(AssertionError, match=r"order 2\.0"):
            check_order(subject)
    else:
        check_order(subject)


def test_a_power_is_fitted():
    assert slope((1, 2, 4), [3, 12, 48]) == pytest.approx(2)
    assert slope((1, 4, 16), [8, 4, 2]) == pytest.approx(-0.5)


def test_an_error_is_relative_to_what_was_expected():
    assert relative_error(torch.tensor([3.0, 8.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.8)


def test_slopes_along_directions_by_hand():
    """Two outputs x₀ + 2x₁ and 10x₁, of which the pattern says that the second depends on the second input only."""
    box = Linear(2, 2)
    box.a = torch.tensor([[1.0, 2.0], [0.0, 10.0]])
    asked = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -2.0], [-1.0, 2.0]])  # spans (2, 2) and (2, -4)
    x, gy = torch.zeros(1, 2), torch.tensor([[1.0, 1.0]])
    # Changes of the two outputs: 6 and 20; -6 and -40. Least squares: Σ change · span / Σ span².
    assert along(asked, box, x, gy, None)[0].tolist() == pytest.approx([(26 * 2 - 46 * 2) / 8, (26 * 2 + 46 * 4) / 20])
    depends = torch.tensor([[True, True], [False, True]])
    assert along(asked, box, x, gy, depends)[0].tolist() == pytest.approx([0, (26 * 2 + 46 * 4) / 20])


def test_a_policy_is_brought_to_a_step():
    policy = rescaled(Gaussian(1e-3), 0.5)
    batch = Batch(torch.zeros(20, 3), torch.Generator().manual_seed(0), 20)
    steps, before = policy.steps({}, batch, 2, 0.0), Gaussian(1e-3)
    assert float(steps.size.square().mean().sqrt()) == pytest.approx(0.5)
    assert vars(policy).keys() - {"steps"} == vars(before).keys()


@pytest.mark.parametrize("mistake", ["moved one by one", "moved by group only"])
def test_mistakes_with_a_pattern_are_caught(mistake):
    class Careless(Central):
        def vjp(self, site: Site, evaluate: Evaluate, max_rows: int) -> Tensor:
            if mistake == "moved one by one":
                site = site._replace(groups=None)
            g = super().vjp(site, evaluate, max_rows)
            return g if site.groups is None else g + 1e-9 * g.roll(1, 1)

    said = "do not move together" if mistake == "moved one by one" else "relative error"
    with pytest.raises(AssertionError, match=said):
        check_structure(Subject(lambda n: Careless(), lambda: Fixed(1e-3), torch.float64, order=2))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_call_runs_every_check(mistake):
    with pytest.raises(AssertionError):
        check_estimator(Damaged(Central(), mistake))


@pytest.mark.parametrize("check", [check_value, check_order])
def test_a_wrong_order_is_caught(check):
    with pytest.raises(AssertionError):
        check(Subject(lambda n: Forward(), lambda: Fixed(1e-3), torch.float64, order=2))


class Careless(Bond):
    """A policy with a mistake."""

    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake

    def steps(self, state, batch, n, noise):
        if self.mistake == "own rows":
            batch = batch._replace(sums=None)
        if self.mistake == "own numbers":
            batch = batch._replace(rows=len(batch.x), first=0)
        return super().steps(state, batch, n, noise)

    def summarize(self, state, seen):
        if self.mistake == "mean":
            return super().summarize(state, seen) / len(seen.g)
        return torch.stack((seen.g.sum(0), seen.g.square().sum(0)))  # NaN and all

    def observe(self, state, summary, rows, differences):
        if self.mistake == "in place":
            state["sums"].add_(1)
        if self.mistake == "NaN":
            return {"sums": state["sums"] + summary}
        return super().observe(state, summary, rows, differences)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("own numbers", "moved otherwise"),
        ("own rows", "moved otherwise"),
        ("mean", "how many processes"),
        ("in place", "written into"),
        ("NaN", "not finite"),
    ],
)
def test_mistakes_of_policies_are_caught(mistake, said):
    policy = Careless(mistake)
    if mistake not in ("mean", "NaN"):
        policy.summarize = Bond().summarize
    with pytest.raises(AssertionError, match=said):
        check_parts(policy)


def test_directions_not_used_are_caught():
    with pytest.raises(AssertionError):
        check_rate(Subject(lambda n: Simultaneous(4), Bond, torch.float64, order=2, simultaneous=True))


def test_a_seed_not_used_is_caught():
    class Constant(Fixed):
        def steps(self, state, batch, n, noise):
            steps = super().steps(state, batch, n, noise)
            return steps._replace(sign=torch.ones_like(steps.sign))

    with pytest.raises(AssertionError):
        check_seed(Subject(lambda n: Central(), lambda: Constant(1e-3), torch.float64, order=2))
