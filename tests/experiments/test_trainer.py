"""One run: what it measures, and that it can be stopped at any step."""

import copy
import functools
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bondgrad.data import Images
from bondgrad.experiments import compilation, task
from bondgrad.experiments.comparison import LOOK, SIGNS, thinned
from bondgrad.experiments.settings import Gradient, Optimizer, Schedule, Settings
from bondgrad.experiments.trainer import Run
from tests.helpers import needs_cuda, on_each_device, same_state

CPU = torch.device("cpu")
NOWHERE = Path("nowhere")
FIXED = {"kind": "fixed", "d_in": 5, "hidden": 20, "d_out": 5}
ECHO = {"kind": "echo", "d_in": 5, "hidden": 20, "d_out": 5, "spectral_radius": 0.5}
HOUSING = Settings(
    run="run",
    data="california_housing",
    loss="huber",
    batch=64,
    epochs=2,
    steps=12,
    read_in={"kind": "ffnn", "sizes": [8, 20, 5], "activation": "relu"},
    box=FIXED,
    read_out={"kind": "ffnn", "sizes": [5, 20, 1]},
)
WAYS = {
    "no box": replace(HOUSING, box=None, gradient=Gradient("AD")),
    "AD": replace(HOUSING, gradient=Gradient("AD")),
    "BOND": HOUSING,
    "BONDS": replace(HOUSING, gradient=Gradient("BONDS", n=2)),
    "forward": replace(HOUSING, gradient=Gradient("forward")),
    "SPSA": replace(HOUSING, gradient=Gradient("SPSA"), optimizer=Optimizer("sgd", 1e-4, 1e-3)),
    "calibrated": replace(HOUSING, gradient=Gradient(policy={"kind": "calibrated"})),
    "gaussian": replace(HOUSING, gradient=Gradient(policy={"kind": "gaussian", "sigma": 1e-3})),
    "noise": replace(HOUSING, box=FIXED | {"noise": 1e-3}, gradient=Gradient(noise=5e-4)),
    "noise, AD": replace(HOUSING, box=FIXED | {"noise": 1e-3}, gradient=Gradient("AD")),
    "echo, AD": replace(HOUSING, box=ECHO, gradient=Gradient("AD")),
    "echo": replace(HOUSING, box=ECHO | {"horizon": 1}, gradient=Gradient(normalize_rows=True)),
    "echo through time": replace(HOUSING, box=ECHO | {"horizon": "auto"}),
    "echo, noise": replace(HOUSING, box=ECHO | {"noise": 1e-3, "horizon": 1}, gradient=Gradient(noise=5e-4)),
    "echo, noise, AD": replace(HOUSING, box=ECHO | {"noise": 1e-3}, gradient=Gradient("AD")),
    "echo, SPSA": replace(HOUSING, box=ECHO, gradient=Gradient("SPSA")),
    "bfloat16": replace(HOUSING, precision="bfloat16"),
}
PICTURES = replace(
    HOUSING,
    data="cifar10",
    loss="cross_entropy",
    batch=4,
    steps=4,
    read_in={"kind": "densenet", "out_features": 5, "depth": 10, "growth": 4},
    read_out={"kind": "ffnn", "sizes": [5, 10]},
)
WAYS["bench"] = replace(
    HOUSING,
    box={"kind": "dots", "groups": 1, "limits": [-3, 3], "bench": {"noise": 0.01, "drift": 1e-3, "hysteresis": 0.01}},
    read_in={"kind": "ffnn", "sizes": [8, 10]},
    read_out={"kind": "ffnn", "sizes": [2, 1]},
    steps=5,
    batch=8,
    gradient=Gradient(policy={"kind": "calibrated"}),
)
WAYS["pictures"] = PICTURES
WAYS["pictures, SPSA"] = replace(PICTURES, gradient=Gradient("SPSA"))


@pytest.fixture(autouse=True)
def pictures(monkeypatch):
    few_pictures(monkeypatch)


def few_pictures(monkeypatch):
    """Random ones in the place of all data sets."""
    random = torch.Generator().manual_seed(0)

    def pictures(name, folder):
        channels, size = (1, 28) if name == "fashion_mnist" else (3, 32)
        x = torch.randint(256, (48, channels, size, size), generator=random, dtype=torch.uint8)
        y = torch.randint(10, (48,), generator=random)
        return Images(x, y, x[:16], y[:16], (0.5,) * channels, (0.25,) * channels, 10)

    made = {}
    monkeypatch.setattr(task, "pictures", lambda name, folder: made.setdefault(name, pictures(name, folder)))


def start(settings, device="cpu"):
    return Run(settings, 3, NOWHERE, torch.device(device))


def finish(run):
    while not run.done:
        run.turn(5)
    return run


def outcome(run):
    """All but the clock's part of it."""
    record = run.record()
    for name in ("seconds", "loop_ms"):
        del record[name]
    return record


def weights(run):
    return {(i, name): t.cpu() for i, part in enumerate(run.parts[:2]) for name, t in part.state_dict().items()}


@on_each_device
@pytest.mark.parametrize("way", WAYS)
def test_resumed_it_goes_on_as_it_would_have(way, device, tmp_path):
    whole = finish(start(WAYS[way], device))
    first = start(WAYS[way], device)
    first.turn(20)  # the first epoch
    first.turn(3)
    torch.save(first.state(), tmp_path / "state.pt")
    finish(first)  # what the first process still does must not reach the second
    second = start(WAYS[way], device)
    second.load(torch.load(tmp_path / "state.pt", weights_only=True, map_location=device))
    finish(second)
    assert outcome(second) == outcome(whole) == outcome(first)
    assert same_state(weights(second), weights(whole))
    assert len(whole.history) == 2


@pytest.mark.parametrize("way", [way for way in WAYS if "AD" not in way and way != "no box"])
def test_measuring_changes_nothing(way):
    looked = finish(start(WAYS[way]))
    not_looked = finish(start(replace(WAYS[way], measure_every=0)))
    assert same_state(weights(looked), weights(not_looked))
    assert looked.history[-1]["parameter_sign_accuracy"] is not None
    assert not_looked.history[-1]["parameter_sign_accuracy"] is None
    assert looked.history[-1]["test_loss"] == not_looked.history[-1]["test_loss"]
    assert looked.asked == not_looked.asked


@pytest.mark.parametrize(
    ("way", "low", "high"),
    [
        ("BOND", 0.98, 1),
        ("forward", 0.98, 1),
        ("BONDS", 0.55, 0.9),
        ("SPSA", 0.4, 0.6),
        ("echo through time", 0.98, 1),
        ("echo", 0.5, 0.95),
        ("echo, SPSA", 0.35, 0.65),
        ("noise", 0.75, 1),
        ("bfloat16", 0.98, 1),
        ("pictures", 0.98, 1),
        ("pictures, SPSA", 0.4, 0.6),
    ],
)
def test_signs_are_as_right_as_they_are(way, low, high):
    record = finish(start(WAYS[way])).record()
    at_box = record["sign_accuracy"]
    assert (at_box is None) == ("SPSA" in way)
    assert low < (record["parameter_sign_accuracy"] if at_box is None else at_box) <= high


def test_signs_at_the_parameters_are_those_of_the_gradients_there():
    """One step of BOND and of AD from the same weights on the same batch: their own gradients, compared."""
    run, exact = start(WAYS["BONDS"]), start(WAYS["AD"])
    for each in (run, exact):
        each.parts.read_in[0].bias.data[:3] = -100  # units without a gradient
    x, y = run.task.batch(run._rows[0], run.crops)
    before = run.comparison.before(x, y)
    loss = run.take_step(x, y)
    exact.take_step(x, y)
    g, reference = (torch.cat([p.grad.flatten() for p in r.parts.read_in.parameters()]) for r in (run, exact))
    seen = dict(zip(LOOK, run.comparison.look(0, loss, before).tolist(), strict=True))
    alive = reference != 0
    right = g.sign() == reference.sign()
    assert 0 < alive.float().mean() < 1
    assert seen["parameter_sign_accuracy"] == pytest.approx(float(right[alive].float().mean()))
    assert seen["all_parameter_sign_accuracy"] == pytest.approx(float(right.float().mean()))
    assert seen["bias_sign_accuracy"] == pytest.approx(float(right[-5:].float().mean()))
    assert len({seen[name] for name in SIGNS}) == 4  # each is something else


def test_deviations_are_over_single_steps():
    run = finish(start(WAYS["BONDS"]))
    shares = [look[LOOK.index("parameter_sign_accuracy")] for look in run.trace]
    record = run.record()
    assert record["parameter_sign_accuracy"] == pytest.approx(statistics.fmean(shares))
    assert record["parameter_sign_deviation"] == pytest.approx(statistics.pstdev(shares))
    assert record["sign_deviation"] != record["parameter_sign_deviation"]
    assert len(run.history[0]) == 10


def test_the_exact_gradient_of_spsa_is_that_of_the_read_in():
    run = start(replace(PICTURES, gradient=Gradient("SPSA"), precision="float32"))
    x, y = run.task.batch(run._rows[0], run.crops)
    averages = {name: t.clone() for name, t in run.parts.read_in.named_buffers()}
    g = run.comparison.before(x, y).exact
    assert all(t.equal(averages[name]) for name, t in run.parts.read_in.named_buffers())
    loss = run._behind(run.parts.through(run._read_in(x)), y)
    exact = torch.autograd.grad(loss, list(run.parts.read_in.parameters()))
    assert torch.allclose(g, torch.cat([part.flatten() for part in exact]))


def test_one_graph_or_two():
    one, two = finish(start(HOUSING)), finish(start(replace(HOUSING, gradient=Gradient(graphs=2))))
    assert same_state(weights(one), weights(two))


def test_an_echo_goes_on_from_batch_to_batch_alike_in_all_ways():
    """AD and BOND remember the same after the same inputs."""
    runs = [start(replace(WAYS[way], optimizer=Optimizer(rate=1e-12))) for way in ("echo, AD", "echo through time")]
    for run in runs:
        run.turn(4)
    state = runs[1].parts.black_box.memory.before(1, True, CPU)[0]
    assert torch.allclose(runs[0].parts.through.state, state, atol=1e-6)
    assert state.abs().max() > 0.01


def test_methods_start_from_the_same_network():
    runs = [start(WAYS[way]) for way in ("AD", "BOND", "SPSA")]
    for i in range(4):
        first, *others = (list(run.parts[i].parameters()) for run in runs)
        assert all(a.equal(b) for other in others for a, b in zip(first, other, strict=True))


def test_noise_is_heard_in_training_but_not_by_the_reference():
    run = start(WAYS["noise"])
    x = torch.randn(4, 5)
    assert not run.parts.through(x).equal(run.parts.through(x))
    assert run.parts.exact(x).equal(run.parts.exact(x))


def test_evaluations_are_counted():
    expected = {"no box": None, "AD": 64, "BOND": 64 * 11, "forward": 64 * 6, "BONDS": 64 * 5, "SPSA": 64 * 3}
    assert {way: finish(start(WAYS[way])).record()["evaluations_per_step"] for way in expected} == expected
    assert finish(start(WAYS["echo"])).record()["evaluations_per_step"] == 11  # sequences


def test_the_trace_is_thinned_to_what_matters():
    trace = [
        [float(i), 1.0, math.nan if i < 5 else 0.5, 1.0, float(i % 7), float(i % 5), float(i % 3), 2.0, 0.6, 0.7, 0.8]
        for i in range(40)
    ]
    thin = thinned(trace, windows=4)
    assert list(thin) == list(LOOK)
    assert {len(values) for values in thin.values()} == {4}
    assert thin["step_max"] == [6.0] * 4
    assert thin["lower"] == [0.0] * 4
    assert thin["sign_accuracy"] == [0.5] * 4
    assert thinned(trace[:4])["sign_accuracy"] == [None] * 4


def test_the_learning_rate_falls_as_in_the_paper():
    run = start(replace(HOUSING, epochs=8, steps=1, schedule=Schedule((0.5, 0.75), (1.0, 0.1, 0.01))))
    finish(run)
    rates = [entry["rate"] / 1e-3 for entry in run.history]
    assert rates == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.1, 0.01])


def test_a_loss_that_is_not_a_number_ends_the_run():
    run = finish(start(replace(HOUSING, gradient=Gradient("AD"), optimizer=Optimizer("sgd", 1e30))))
    assert run.record()["failed"].startswith("the loss was nan in epoch 1")
    assert run.record()["epochs_run"] == 0


def test_time_is_measured_without_the_measuring(monkeypatch):
    import time

    run = start(HOUSING)
    look, before = run.comparison.look, run.comparison.before
    monkeypatch.setattr(run.comparison, "look", lambda *a: (time.sleep(0.05), look(*a))[1])
    monkeypatch.setattr(run.comparison, "before", lambda *a: (time.sleep(0.05), before(*a))[1])
    run.turn(4, timed=True)
    assert max(run.milliseconds) < 1e3 * run.seconds / 4
    assert run.seconds > 0.4
    assert len(run.milliseconds) == 4


@pytest.mark.filterwarnings("ignore")  # of torch itself, while it compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_networks_learn_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv(compilation.CACHE, "")  # so that it is put back in the end
    monkeypatch.delenv(compilation.CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = replace(HOUSING, compile=True)
    first = start(settings)
    first.turn(20)
    second = start(settings)
    second.load(copy.deepcopy(first.state()))
    compiled, resumed, plain = finish(first).record(), finish(second).record(), finish(start(HOUSING)).record()
    assert compiled["curve"] == resumed["curve"]
    assert same_state(weights(first), weights(second))
    assert compiled["test_loss"] == pytest.approx(plain["test_loss"], rel=1e-4)
    assert compiled["compiled"] is True
    assert any((tmp_path / "bondgrad" / "compiled").iterdir())


@pytest.mark.filterwarnings("ignore")  # of torch itself, while it compiles
def test_many_networks_are_compiled_in_one_process(monkeypatch):
    """Each architecture once with and once without a gradient: more than torch.compile allows by itself."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compilation._compiled_forward.cache_clear()
    for width in range(1, 7):
        network = torch.nn.Linear(4, width)
        fast, x = compilation.compiled(network), torch.ones(2, 4)
        assert torch.equal(fast(x), network(x))
        with torch.no_grad():
            assert torch.equal(fast(x), network(x))
    compilation._compiled_forward.cache_clear()


@needs_cuda
@pytest.mark.parametrize("way", [way for way in WAYS if way != "bench"])  # which looks at its voltages
def test_captured_steps_are_those_that_ran_as_they_were(way):
    graphed, eager = start(WAYS[way], "cuda"), start(replace(WAYS[way], graph=False), "cuda")
    assert outcome(finish(graphed)) | {"graph": False} == outcome(finish(eager))
    assert same_state(weights(graphed), weights(eager))
    assert graphed.take_step.replays > 0 or "calibrated" in way or "echo" in way, graphed.take_step.eager_steps


@needs_cuda
@pytest.mark.filterwarnings("ignore")  # of torch itself, while it compiles
def test_compiled_steps_are_captured():
    """Compiled and captured, a run is what it is compiled alone, and learns what it learns without either."""
    runs = [
        start(replace(PICTURES, compile=c, graph=g), "cuda") for c, g in ((True, True), (True, False), (False, False))
    ]
    captured, compiled, plain = (outcome(finish(run)) for run in runs)
    assert runs[0].take_step.replays > 0
    assert captured | {"graph": False} == compiled
    assert same_state(weights(runs[0]), weights(runs[1]))
    assert compiled["test_loss"] == pytest.approx(plain["test_loss"], rel=1e-2)
