"""Probe names boxes for what they are, within its budget and the limits, and leaves no trace."""

import json
import math
import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import bondgrad
from bondgrad import BoxError, probe
from bondgrad.cli import main
from bondgrad.networks import ffnn
from bondgrad.probing import Session
from bondgrad.testing.boxes import Sparse, TanhNetwork
from tests.helpers import needs_cuda, noisy
from tests.patterns import blocks

D = 4
WEIGHTS = np.random.default_rng(0).normal(size=(D, 3)) / 2


def simulator(x):
    return np.tanh(x @ WEIGHTS.astype(x.dtype))


def network(*middle):
    return nn.Sequential(nn.Linear(D, 30), *middle, nn.Linear(30, 3))


def rows(n=200, d=D, **kind):
    return torch.randn(n, d, **kind)


# ---- what boxes are


def test_a_numpy_function():
    report = probe(simulator, rows())
    assert report.verdict.startswith("deterministic, smooth, float32")
    assert report.randomness.exact
    assert (report.in_features, report.out_features) == (D, 3)
    assert report.rounding.floor < 1e-6
    assert report.steps.low_5 < 1e-4
    assert report.steps.high_5 > 0.1
    assert 1e-4 < report.steps.best < 0.3
    assert set(report.reasons) == {"in_features", "out_features"}
    assert report.left_out == []
    assert "float64" in probe(simulator, rows(dtype=torch.float64)).verdict


@pytest.fixture
def tf32_allowed():
    torch.set_float32_matmul_precision("high")
    yield
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")


def check_tf32(report):
    assert "float32, but TF32 or float16 as set here" in report.verdict
    assert report.rounding.floor < 1e-5
    assert 1e-5 < report.rounding.shortcut < 2e-3
    assert "noise" not in report.reasons  # BlackBox switches it off


@needs_cuda
def test_a_network_with_tf32_on(tf32_allowed):
    check_tf32(probe(ffnn([50, 500, 50]).cuda(), rows(d=50, device="cuda")))


def test_a_function_that_does_as_tf32_does(tf32_allowed):
    first, second = (0.1 * torch.randn(*shape) for shape in ((D, 500), (500, 3)))

    def fn(x):
        rounded = rounded_to_tf32 if torch.get_float32_matmul_precision() == "high" else torch.Tensor.clone
        return rounded(torch.tanh(rounded(x) @ rounded(first))) @ rounded(second)

    check_tf32(probe(fn, rows()))


def test_a_network_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        report = probe(network(nn.Tanh()), rows())
    assert "float32, but bfloat16 as set here" in report.verdict
    assert "full_precision=False" in str(report)


def rounded_to_tf32(x):
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize(("rounded", "name"), [(rounded_to_tf32, "TF32"), (lambda x: x.bfloat16().float(), "bfloat16")])
def test_coarse_arithmetic_inside(rounded, name):
    first, second = (0.3 * torch.randn(*shape) for shape in ((D, 30), (30, 3)))
    report = probe(lambda x: rounded(torch.tanh(rounded(x) @ rounded(first))) @ rounded(second), rows())
    assert name in report.rounding.precision
    assert "noise" in report.reasons


def test_dropout():
    report = probe(network(nn.Tanh(), nn.Dropout(0.1)), rows())
    assert report.verdict.startswith("random: dropout (p = 0.1) in training mode, drawn from torch's generator")
    assert report.randomness.quiet_in_eval
    assert "noise" not in report.reasons  # BlackBox keeps modules in eval mode
    assert any("eval mode" in text for text in report.warnings)


def test_batch_normalisation_in_training_mode():
    report = probe(network(nn.BatchNorm1d(30), nn.Tanh()), rows())
    assert report.verdict.startswith("rows influence one another (batch normalisation in training mode)")
    assert not report.speed.takes_single_rows
    assert report.dependence is None
    assert "Structure: rows influence one another" in report.left_out[0]
    quiet = probe(network(nn.BatchNorm1d(30), nn.Tanh()).eval(), rows())
    assert not quiet.company.matters


def test_a_box_that_sleeps():
    def sleepy(x):
        time.sleep(2e-3 * len(x))
        return torch.sin(x)

    report = probe(sleepy, rows(), budget=700)
    assert "ms a row, not vectorised" in report.verdict
    assert report.evaluations <= 700
    cost = report.cost(batch=10, steps=3600)["central"]
    assert cost.seconds >= 2e-3 * cost.evaluations * 0.99
    assert cost.hours == pytest.approx(cost.seconds)


def test_time_runs_out():
    def slow(x):
        time.sleep(0.02 * len(x))
        return torch.sin(x)

    report = probe(slow, rows(), seconds=1.5)
    assert report.evaluations <= 76
    assert report.speed is not None
    assert any(text.startswith("Structure") for text in report.left_out)


@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_a_noisy_device(name):
    generator = torch.Generator().manual_seed(0)

    def device(x):
        y = torch.sin(x).cumsum(1)
        drawn = torch.rand(y.shape, generator=generator) * 2 - 1
        return y + 3e-3 * (drawn if name == "uniform" else torch.randn(y.shape, generator=generator) / 2)

    report = probe(device, rows())
    assert report.verdict.startswith("noisy device, half-width 0.003")
    assert all(abs(b / 3e-3 - 1) < 0.3 for b in report.randomness.half_width)
    assert report.randomness.generator is None
    assert report.steps.best >= 0.03
    assert {"noise", "policy"} <= set(report.reasons)
    assert not report.history.drifts
    assert not report.history.remembers
    assert not report.company.matters


# ---- single findings


@pytest.mark.parametrize("name", ["torch", "numpy", "python"])
def test_seeds(name):
    def fn(x):
        drawn = {"torch": torch.randn(len(x), 1), "numpy": torch.from_numpy(np.random.randn(len(x), 1)).float()}
        return torch.sin(x) + 0.01 * drawn.get(name, random.gauss(0, 1))

    found = probe(fn, rows()).randomness
    assert (found.generator, found.repeatable) == (name, True)
    assert found.within_a_call == (name != "python")


def test_rare_noise_is_not_taken_for_seeded():
    own = torch.Generator().manual_seed(0)

    def fn(x):
        assert len(x) == 1
        return torch.sin(x) + (torch.rand(x.shape, generator=own) < 0.03).float()

    for seed in range(3):
        found = probe(fn, rows(), seed=seed).randomness
        assert not found.deterministic
        assert found.generator is None


def test_a_seed_as_keyword():
    own = torch.Generator().manual_seed(0)

    def fn(x, seed=None):
        generator = own if seed is None else torch.Generator().manual_seed(seed)
        return torch.sin(x) + 0.01 * torch.randn(x.shape, generator=generator)

    report = probe(fn, rows())
    assert report.randomness.takes_seed
    assert "takes a seed" in report.verdict


def test_drift():
    asked = 0

    def fn(x):
        nonlocal asked
        asked += len(x)
        return torch.sin(x) + 1e-5 * asked

    report = probe(fn, rows())
    assert report.verdict.startswith("drifts")
    assert report.history.per_evaluation == pytest.approx(1e-5 / 0.63, rel=0.2)
    assert not report.history.remembers
    assert not report.company.matters
    slow = probe(noisy(fn, 1e-3), rows())
    assert slow.history.drifts
    assert slow.randomness.std[0] == pytest.approx(1e-3, rel=0.5)


def test_memory():
    before = torch.zeros(D)

    def fn(x):
        nonlocal before
        y = torch.sin(x) + 0.1 * before
        before = x.mean(0)
        return y

    report = probe(fn, rows())
    assert "remembers" in report.verdict


def test_rows_that_influence_one_another():
    assert probe(lambda x: x - x.mean(0), rows()).company.matters
    assert probe(lambda x: x.sort(0).values, rows()).company.matters
    assert probe(noisy(lambda x: x / x.std(0), 1e-2), rows()).company.matters


def test_decimals_and_converters():
    report = probe(lambda x: (100 * torch.sin(x)).round() / 100, rows())
    assert "quantised in steps of 0.01" in report.verdict
    assert "decimals" in report.rounding.words
    assert report.reasons["noise"].startswith("half a step")
    step = 2 / 255
    found = probe(lambda x: (torch.tanh(x) / step).round() * step, rows()).rounding
    assert found.quantum == pytest.approx([step] * D, rel=1e-3)
    assert probe(noisy(TanhNetwork(), 1e-3), rows()).rounding.quantum == [None] * 6


def test_kinks_jumps_and_saturation():
    torch.manual_seed(1)
    assert probe(network(nn.ReLU()), rows()).smoothness.kind == "kinks"
    assert probe(network(nn.Tanh()), rows()).smoothness.kind == "smooth"
    jumping = probe(lambda x: torch.floor(3 * x).cumsum(1) + x, rows())
    assert jumping.smoothness.kind == "jumps"
    assert "policy" in jumping.reasons
    assert "saturated" in probe(lambda x: torch.tanh(20 * x), rows()).verdict
    assert "constant" in probe(lambda x: 0 * x + 1, rows()).verdict


def test_rounded_points_are_not_taken_for_jumps():
    for seed in range(5):
        assert probe(lambda x: torch.tanh(x - 100), rows() + 100, seed=seed).smoothness.kind == "smooth"
        assert probe(lambda x: torch.tanh(x.double()), rows(), seed=seed).smoothness.kind == "smooth"


def test_steps_cut_short_by_limits_are_not_judged():
    found = probe(torch.square, torch.rand(200, D), limits=(0, 1)).steps
    long = [e for h, e in zip(found.ladder, found.disagreement, strict=False) if h > 1e-3 and e is not None]
    assert len(long) > 3
    assert max(long) < 1e-3  # of a parabola, central differences are right over any step


def test_where_it_fails():
    def fn(x):
        y = torch.sin(x).clone()
        y[x[:, 2] < -1.3] = math.nan
        if bool((x[:, 1] > 1.7).any()):
            raise OverflowError("too much")
        return y

    report = probe(fn, rows())
    assert "fails in places" in report.verdict
    first, second = report.ranges.failures
    assert (first.input, first.low) == (1, pytest.approx(1.7, abs=0.01))
    assert (second.input, second.high) == (2, pytest.approx(-1.3, abs=0.01))
    assert "input 2 below -1.3: NaN" in str(report)
    assert "input 1 above 1.7: raises OverflowError" in str(report)


def test_inputs_that_matter():
    def fn(x):
        return torch.stack([3 * x[:, 0] + x[:, 2], x[:, 2].sin()], 1)

    found = probe(fn, rows()).sensitivity
    assert found.dead == [1, 3]
    assert found.change[0] == pytest.approx(3 / 10**0.5 / 2**0.5, rel=0.2)
    assert found.change[1] == 0
    assert probe(noisy(fn, 1e-3), rows()).sensitivity.dead == [1, 3]


def test_structure():
    report = probe(Sparse(blocks(10, 5, 3)), rows(d=50))
    assert report.dependence.blocks == (5, 3)
    assert "10 blocks of 5 inputs: 10 evaluations a row" in str(report)
    assert "Blocks(5, 3)" in report.code
    assert report.cost(batch=2)["central"].evaluations == 2 * 11
    assert probe(simulator, rows()).dependence.groups == D


def test_one_row_at_a_time():
    def fn(x):
        assert len(x) == 1
        return torch.sin(x)

    report = probe(fn, rows())
    assert "one row at a time" in report.verdict
    assert "Local(max_rows=1)" in report.code


# ---- what a probe may do


@pytest.mark.parametrize("budget", [16, 30, 100, 333, 1000, 4000])
@pytest.mark.parametrize("kind", ["plain", "noisy", "single rows", "a few rows", "raises"])
def test_never_more_than_the_budget(budget, kind):
    asked = 0

    def fn(x):
        nonlocal asked
        asked += len(x)
        most = {"single rows": 1, "a few rows": 3}.get(kind, 10_000)
        if len(x) > most or (kind == "raises" and bool((np.asarray(x)[:, 0] > 1).any())):
            raise ValueError("no")
        return np.sin(x) + (1e-2 * np.random.rand(*x.shape) if kind == "noisy" else 0)

    report = probe(fn, rows(), budget=budget)
    assert 1 < asked <= budget
    assert report.evaluations == asked
    assert report.left_out or budget == 4000
    assert report.verdict
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.parametrize("limits", [(0.1, 0.3), (-1, [0.1, 0.7, 2.0, 1e3]), (-math.inf, 0.5)])
def test_nothing_outside_the_limits(limits):
    lowest, highest = torch.full((D,), math.inf), torch.full((D,), -math.inf)

    def fn(x):
        torch.minimum(lowest, x.amin(0), out=lowest)
        torch.maximum(highest, x.amax(0), out=highest)
        return torch.sin(3 * x)

    report = probe(fn, rows(), limits=limits)
    low, high = (torch.as_tensor(limit, dtype=torch.float64) for limit in limits)
    assert bool((lowest.double() >= low).all())
    assert bool((highest.double() <= high).all())
    compile(report.code, "code", "exec")
    assert report.limits == tuple(limit.expand(D).tolist() for limit in (low, high))


def test_no_trace():
    module = network(nn.BatchNorm1d(30), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    probe(module, rows(generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(m.training for m in module.modules())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]
    assert all(p.requires_grad for p in module.parameters())


def test_the_same_seed_gives_the_same_report():
    x = rows()
    one, other = (probe(simulator, x, seed=3).as_dict() for _ in range(2))
    for report in (one, other):
        for name in ("speed", "seconds", "evaluations", "calls", "history", "cost", "words", "verdict"):  # of time
            del report[name]
    assert one == other


def test_context():
    found = probe(lambda x, wind: torch.sin(x) * wind, rows(), torch.rand(200, 1) + 0.5)
    assert found.verdict.startswith("deterministic, smooth")


def test_another_default_device():
    seen = set()

    def fn(x):
        seen.add(torch.empty(1).device.type)
        return torch.sin(x)

    x = rows()
    torch.set_default_device("meta")
    try:
        report = probe(fn, x, limits=(-3, 3))
    finally:
        torch.set_default_device(None)
    assert report.verdict.startswith("deterministic, smooth, float32")
    assert seen == {"meta"}


def test_few_rows_and_other_kinds():
    assert probe(torch.sin, rows(1)).steps.best is not None
    assert probe(torch.sin, rows(3).half()).dtype == "float32"
    assert probe(torch.sin, torch.zeros(5, 2)).verdict.startswith("deterministic")


def test_mistakes_are_named():
    for arguments, message in [
        ({"x": torch.zeros(3)}, "x must be rows"),
        ({"x": torch.full((3, 2), math.nan)}, "x must be finite"),
        ({"budget": 3}, "budget must be at least 16"),
        ({"seconds": -1}, "seconds must be"),
        ({"limits": (1, 0)}, "limits"),
    ]:
        with pytest.raises(ValueError, match=message):
            probe(torch.sin, **({"x": rows()} | arguments))
    with pytest.raises(BoxError, match="one row of outputs per row"):
        probe(lambda x: x.sum(), rows())
    nothing = probe(lambda x: x * math.nan, rows())
    assert "no finite answer" in nothing.left_out[0]
    assert nothing.verdict == "nothing could be found out"
    for budget in (16, 17, 1000):
        with pytest.raises(BoxError, match="raised KeyError"):
            probe(broken, rows(), budget=budget)


def broken(x):
    raise KeyError("out of order")


def test_one_call_longer_than_the_time():
    def slow(x):
        time.sleep(0.02)
        return torch.sin(x)

    report = probe(slow, rows(), seconds=0.01)
    assert report.evaluations == 1
    assert report.out_features == D
    assert "in the time left" in report.left_out[0]
    compile(report.code, "code", "exec")


def test_a_box_that_runs_out_of_memory():
    def fn(x):
        if len(x) > 20:
            raise torch.OutOfMemoryError("out of memory")
        return torch.sin(x)

    report = probe(fn, rows())
    assert report.verdict.startswith("deterministic, smooth")
    assert list(report.speed.batches) == ["1", "8"]


def test_strong_noise_hides_what_it_hides():
    report = probe(noisy(torch.sin, 0.2), rows())
    assert report.sensitivity.dead is None
    assert report.dependence is None
    assert "structure" not in report.reasons
    assert any("would hide it" in text for text in report.left_out)


# ---- what comes of it


def test_json():
    found = probe(noisy(TanhNetwork(), 1e-3), rows(), limits=(-math.inf, 5)).as_dict(batch=7, steps=9)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["cost"]["batch"] == 7
    assert found["cost"]["central"]["evaluations"] == 7 * 9


@pytest.mark.parametrize("kind", ["smooth", "noisy", "single", "blocks", "module"])
def test_the_recommended_code_trains(kind, monkeypatch):
    from bondgrad import box as layer

    if "calibrated" not in layer.POLICIES:
        monkeypatch.setitem(layer.POLICIES, "calibrated", bondgrad.policies.Bond)

    def single(x):
        assert len(x) == 1
        return torch.sin(x)

    fn = {
        "smooth": simulator,
        "noisy": noisy(torch.sin, 1e-3),
        "single": single,
        "blocks": Sparse(blocks(2, 2, 2)),
        "module": network(nn.Dropout(0.2)),
    }[kind]
    report = probe(fn, rows(), limits=(-3, 3))
    names = {report.name: fn}
    exec(report.code, names)  # noqa: S102
    read_in = nn.Linear(2, D)
    model = nn.Sequential(read_in, names["box"], nn.Linear(report.out_features, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x = torch.randn(64, 2)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(model(x), x[:, :1].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert read_in.weight.grad.abs().max() > 0


# ---- the command line


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "bench_box.py").write_text(
        "import numpy as np\n\n\ndef read(x):\n    return np.sin(x).cumsum(1)\n\n\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    yield tmp_path
    __import__("sys").modules.pop("bench_box", None)


def cli(*arguments):
    return CliRunner().invoke(main, ["probe", *map(str, arguments)])


def test_the_command(here):
    done = cli("bench_box:read", "--in-features", 3, "--limits", -2, 2, "--plot", "steps.png", "--budget", 3000)
    assert done.exit_code == 0, done.output
    assert "deterministic, smooth, float32" in done.output
    assert "drawn uniformly within the limits" in done.output
    assert "bondgrad.BlackBox(" in done.output
    assert "1,000 training steps of 64 rows" in done.output
    assert (here / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_in_json(here):
    np.save("typical.npy", np.random.default_rng(0).normal(size=(50, 3)))
    done = cli("bench_box:read", "--in-features", 3, "--sample", "typical.npy", "--json", "--batch", 8, "--steps", 5)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["name"] == "read"
    assert found["dtype"] == "float64"
    assert found["sample"] == "50 rows of typical.npy"
    assert found["cost"]["central"]["evaluations"] == 8 * 7
    assert "standard normal" in json.loads(cli("bench_box:read", "--in-features", 3, "--json").stdout)["sample"]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("bench_box", "MODULE:FUNCTION"),
        ("no_such_module:read", "could not be imported"),
        ("bench_box:nothing", "has no 'nothing'"),
        ("bench_box:number", "not a function but int"),
    ],
)
def test_wrong_targets(here, target, says):
    done = cli(target, "--in-features", 3)
    assert done.exit_code == 2
    assert says in done.output


def test_a_wrong_sample(here):
    np.save("wide.npy", np.zeros((5, 7)))
    for path, says in (("wide.npy", "got [5, 7]"), ("bench_box.py", "could not be read")):
        done = cli("bench_box:read", "--in-features", 3, "--sample", path)
        assert done.exit_code == 2
        assert says in done.output


def test_an_interrupt_prints_what_there_is(here, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("bondgrad.probing._probe.measure_steps", interrupted)
    before = torch.get_rng_state()
    done = cli("bench_box:read", "--in-features", 3)
    assert done.exit_code == 0, done.output
    assert "Interrupted" in done.output
    assert "Rounding" in done.output
    assert torch.equal(torch.get_rng_state(), before)


def test_a_session_can_be_watched():
    session = Session(simulator, rows())
    names = list(session.run())
    assert names[0] == "First questions"
    assert names[-1] == "History"
    assert session.report().verdict.startswith("deterministic")
