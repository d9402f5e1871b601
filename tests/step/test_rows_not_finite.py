"""Rows of x that are not finite: a box with limits is never given them, and they count as rows without an output."""

import contextlib
import copy
import math
import warnings

import pytest
import torch

from bondgrad import BlackBox, BoxError, check, probe
from bondgrad.evaluators import Local, Processes, Threads
from bondgrad.policies import Fixed, Policy, Steps
from bondgrad.structure import Sequence, detect
from tests.evaluators.boxes import sine
from tests.helpers import close, gradient, needs_cuda, same_state

TOLD = r"x is not finite \(NaN or infinite\) in 2 rows, which were not sent to the box"
OTHERS = [0, 1, 3, 5]


class Device:
    """The sine, which must never be given a number outside of its limits, or none at all."""

    def __init__(self):
        self.rows = 0

    def __call__(self, x: torch.Tensor):
        assert bool((x.abs() <= 1).all()), "a number that is not admissible"
        self.rows += len(x)
        return torch.sin(x)

    def __deepcopy__(self, memo):
        return Device()


def batch():
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)) / 3
    x[2, 1], x[4, 0] = math.nan, -math.inf
    return x


def layer_with(fn=None, **options):
    return BlackBox(Device() if fn is None else fn, 3, limits=(-1, 1), seed=0, **options)


@contextlib.contextmanager
def told_once():
    """One warning, and no other one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.warns(UserWarning, match=f"{TOLD}.*network before the box.*lower the learning rate.$") as told:
            yield
    assert len(told) == 1


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("policy", ["calibrated", "bond"])
@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
def test_in_training_it_is_as_if_the_box_had_not_answered_them(estimator, policy, eager):
    layer, twin = (layer_with(estimator=estimator, policy=policy, eager=eager) for _ in range(2))
    gy = torch.randn(6, 3)
    twin.eager = False  # batches of other sizes come in another order
    with told_once():
        for step in range(3):
            y = layer(x := batch().requires_grad_())
            assert layer.last_ok.tolist() == [row in OTHERS for row in range(6)]
            assert torch.allclose(y[[2, 4]], layer.progress.output_mean.expand(2, 3))
            (g,) = torch.autograd.grad(y, x, gy)
            assert torch.equal(g[OTHERS], gradient(twin, batch()[OTHERS], gy[OTHERS]))
            assert not g[[2, 4]].any()
            assert layer.stats.failures == 2 * (step + 1)
    assert layer.stats.evaluations == layer.fn.rows == twin.fn.rows
    assert same_state(layer.state_dict(), twin.state_dict(), but=["output_mean", "batches"])


@pytest.mark.parametrize(
    "evaluator", [Local(max_rows=1), Local(max_rows=2), Threads(2), lambda: Processes(1)], ids=["1", "2", "3", "4"]
)
def test_with_every_evaluator(evaluator):
    if not isinstance(evaluator, Local | Threads):
        pytest.importorskip("pebble")
        evaluator = evaluator()
    with evaluator, told_once():
        layer = layer_with(sine, policy=Fixed(1e-2), evaluator=evaluator)
        g = gradient(layer, batch(), torch.ones(6, 3))
    exact = batch().cos() + torch.tensor([3.0, 0, 0])
    exact[[2, 4]] = 0
    assert close(g, exact, 1e-2)
    assert layer.stats.evaluations == 4 * 7


def test_in_evaluation_they_are_nan():
    layer = layer_with().eval()
    with told_once():
        y = layer(batch())
    assert torch.equal(y[OTHERS], batch()[OTHERS].sin())
    assert y[[2, 4]].isnan().all()
    assert layer.fn.rows == 4
    assert layer.stats.failures == 2


@pytest.mark.parametrize("training", [True, False])
def test_where_failures_are_errors_the_error_says_so(training):
    layer = layer_with(on_failure="raise").train(training)
    with pytest.raises(BoxError, match=f"{TOLD}.*lower the learning rate.$"):
        layer(batch())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("state", [None, torch.zeros(1, 3)])
def test_no_finite_row_at_all_is_an_error_before_any_call(training, state):
    fn = Device()
    box = fn if state is None else (lambda x, state: (fn(x), state))
    layer = layer_with(box, state=state).train(training)
    with pytest.raises(
        BoxError, match=r"x must be finite .* none of its 2 rows is: they all have NaN .*lower the learning rate.$"
    ):
        layer(batch()[[2, 4]])
    assert fn.rows == 0
    assert layer(batch()[[0, 1]]).shape == (2, 3)


def test_other_failures_are_told_of_as_such():
    layer = layer_with(lambda x: torch.where(x[:, :1] == batch()[5, 0], math.nan, torch.sin(x)))
    with pytest.warns(UserWarning, match=TOLD), pytest.warns(UserWarning, match="^1 row got no finite output"):
        layer(batch())
    assert layer.last_ok.tolist() == [True, True, False, True, False, False]
    assert layer.stats.failures == 3


def test_a_sum_that_overflows_is_no_failure():
    layer = BlackBox(lambda x: x * 1e-38, 1, limits=(-math.inf, 3.4e38))
    assert torch.equal(layer(torch.full((2, 1), 3e38)), torch.full((2, 1), 3e38) * 1e-38)
    assert layer.last_ok.tolist() == [True, True]


def test_without_limits_x_is_the_business_of_the_box():
    layer = BlackBox(lambda x: torch.isnan(x).float(), 3)
    assert layer(batch())[2].tolist() == [0, 1, 0]


def test_a_sequence_with_one_such_number_is_left_out_as_a_whole():
    layer = BlackBox(lambda x: Device()(x).cumsum(1), 3, structure=Sequence(), limits=(-1, 1), policy=Fixed(1e-2))
    x = (torch.randn(3, 4, 3) / 3).clamp(-0.9, 0.9)
    x[1, 2, 0] = math.nan
    with pytest.warns(UserWarning, match="x is not finite .* in 1 row, which was not sent"):
        g = gradient(layer, x, torch.ones(3, 4, 3))
    exact = x.cos() * torch.tensor([4.0, 3, 2, 1])[:, None]
    exact[1] = 0
    assert close(g, exact, 1e-2)
    assert layer.last_ok.tolist() == [True, False, True]


def test_such_a_row_stays_where_it_was_in_a_box_with_a_state():
    fn = Device()

    def leaky(x, state):
        state = 0.5 * state + fn(x)
        return state, state

    layer = BlackBox(leaky, 3, state=torch.zeros(1, 3), limits=(-1, 1), policy=Fixed(1e-2), seed=0)
    finite, memory = batch().nan_to_num(0, 0, 0), torch.zeros(6, 3)
    for x in (finite, batch(), finite):
        bad = ~torch.isfinite(x).all(1)
        with told_once() if bool(bad.any()) else contextlib.nullcontext():
            g = gradient(layer, x, torch.ones(6, 3))
        memory = torch.where(bad[:, None], memory, 0.5 * memory + finite.sin())
        exact = finite.cos()
        exact[bad] = 0
        assert close(g, exact, 1e-2)
    assert torch.allclose(layer(finite), 0.5 * memory + finite.sin())
    assert layer.stats.failures == 2


def test_so_it_does_in_a_sequence_of_which_only_the_end_is_not_finite():
    fn = Device()

    def leaky(x, state):
        ys = []
        for now in x.unbind(1):
            state = 0.5 * state + fn(now)
            ys.append(state)
        return torch.stack(ys, 1), state

    layer = BlackBox(leaky, 3, state=torch.zeros(1, 3), structure=Sequence(), limits=(-1, 1), policy=Fixed(1e-2))
    x = torch.full((2, 4, 3), 0.5)
    x[1, 3, 2] = math.nan
    with pytest.warns(UserWarning, match="in 1 row, which was not"):
        g = gradient(layer, x, torch.ones(2, 4, 3))
    exact = x[0].cos() * torch.tensor([1.875, 1.75, 1.5, 1])[:, None]
    assert close(g[0], exact, 1e-2)
    assert not g[1].any()
    (now,) = layer.memory.before(2, True, torch.device("cpu"))
    assert now[0, 0] > 0.5
    assert not now[1].any()


def test_a_box_that_keeps_its_own_state_is_given_all_rows_or_none():
    class Keeps(Device):
        def snapshot(self):
            return self.rows

        def restore(self, rows):
            self.rows = rows

    layer = layer_with(Keeps(), policy=Fixed(1e-2))
    with pytest.raises(BoxError, match=r"2 of its 6 rows are not .*so that none can be left out.*learning rate"):
        layer(batch())
    assert layer.fn.rows == 0
    assert torch.isfinite(gradient(layer, batch()[OTHERS], torch.ones(4, 3))).all()


class Reckless(Policy):
    """Steps of which some are NaN or infinite."""

    def steps(self, state, batch, n, noise):
        size = torch.full((3,), 1e-2)
        sizes = size.expand(n, *batch.x.shape).clone()
        sizes[:, 0, 1], sizes[:, 1, 2] = math.nan, math.inf
        return Steps(sizes, batch.uniform(n), size, size)


@pytest.mark.filterwarnings("ignore:.*rows? got no finite output")
@pytest.mark.parametrize("max_rows", [None, 1, 3])
def test_perturbed_points_that_are_not_numbers_are_not_evaluated(max_rows):
    layer = layer_with(policy=Reckless(), evaluator=Local(max_rows=max_rows))
    x = batch()[OTHERS]
    g = gradient(layer, x, torch.ones(4, 3))
    exact = x.cos()
    exact[0, 1] = 0
    wide = torch.ones(4, 3, dtype=torch.bool)
    wide[1, 2] = False  # a move to the limits
    assert close(g[wide], exact[wide], 1e-2)
    assert layer.fn.rows == 4 + 4 * 6 - 2


def test_what_a_policy_learns_does_not_have_them():
    seen = []

    class Looks(Fixed):
        def steps(self, state, batch, n, noise):
            seen.append(batch.x)
            return super().steps(state, batch, n, noise)

    def leaky(x, state):
        return torch.sin(x) + state, state

    layer = layer_with(leaky, policy=Looks(1e-2), state=torch.zeros(1, 3))
    with told_once():
        gradient(layer, batch(), torch.ones(6, 3))
    x, mean = batch()[OTHERS], batch()[OTHERS].mean(0)
    assert torch.equal(seen[0][OTHERS], x)
    assert torch.allclose(seen[0][[2, 4]], mean.expand(2, 3))


@pytest.mark.parametrize("structure", [None, "auto"])
def test_compiled_and_transformed(structure):
    layer = layer_with(out_features=3, policy=Fixed(1e-2), structure=structure)
    exact = batch().cos()
    exact[[2, 4]] = 0
    with told_once():
        g = torch.func.grad(lambda x: layer(x).sum())(batch())
        assert close(g, exact, 1e-2)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert close(gradient(compiled, batch(), torch.ones(6, 3)), exact, 1e-2)
    assert layer.stats.failures == 4


def test_where_nothing_can_be_read_they_are_evaluated_inside_the_limits_and_fail(monkeypatch):
    monkeypatch.setattr("bondgrad.torch_support._device.reading_is_free", lambda device: False)
    check_without_reading(layer_with(policy=Fixed(1e-2)), batch())


@needs_cuda
@pytest.mark.parametrize("eager", [False, True])
def test_so_they_do_on_a_gpu_without_waiting_for_it(eager):
    layer, x = layer_with(policy=Fixed(1e-2), eager=eager), batch().cuda()
    layer.fn = lambda x: torch.sin(torch.where(x.abs() <= 1, x, 1e9))
    check_without_reading(layer, x)
    with pytest.warns(UserWarning, match="rows? got no finite output"):
        assert layer.stats.failures == 12
    gradient(layer, x, torch.ones_like(x))
    gy = torch.ones_like(x)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        gradient(layer, x, gy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_without_reading(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    assert y[[2, 4]].isnan().all()
    assert torch.equal(y[OTHERS], x[OTHERS].sin())
    (g,) = torch.autograd.grad(y, x, torch.ones_like(x))
    assert close(g[OTHERS], x[OTHERS].detach().cos(), 1e-2)
    assert not g[[2, 4]].any()


def test_measurements_do_not_evaluate_them_either():
    fn = Device()
    for measure in (probe, lambda fn, x, **options: check(layer_with(fn), x, **options)):
        with pytest.raises(ValueError, match="x must be finite"):
            measure(fn, batch(), limits=(-1, 1))
    assert fn.rows == 0
    detect(fn, batch(), limits=(-1, 1))
    assert fn.rows > 0


def test_a_copy_warns_for_itself():
    layer = layer_with()
    other = copy.deepcopy(layer)
    for one in (layer, other):
        with told_once():
            one(batch())
            one(batch())
