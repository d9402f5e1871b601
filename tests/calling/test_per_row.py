"""Functions of one sample as boxes: what they are given, what they may return, what errors cost, what is counted."""

import copy
import functools
import math
import pickle

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

import bondgrad
from bondgrad import BlackBox, BoxError, per_row
from bondgrad.calling._function import RowFunction
from bondgrad.evaluators import Journal, Local, Processes, Threads
from bondgrad.policies import Fixed
from bondgrad.structure import Blocks, Sequence
from tests.helpers import close, gradient

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))  # only row 4 begins with a number above 1


def wave(x):
    return [math.sin(x[0]), x[1] * x[2]]


def hot(x):
    if x[0] > 1:
        raise ValueError("too hot")
    return wave(x)


def expected(x):
    return torch.stack((x[:, 0].sin(), x[:, 1] * x[:, 2]), 1)


# ---- what it is given


def test_it_trains_like_a_function_of_rows():
    layer, twin = (BlackBox(fn, 3, policy=Fixed(1e-2), seed=0) for fn in (per_row(wave), expected))
    assert torch.allclose(layer(X), twin(X))
    gy = torch.randn(6, 2)
    assert torch.allclose(gradient(layer, X, gy), gradient(twin, X, gy), atol=1e-4)
    assert "  wave, in_features=3" in repr(layer)


@pytest.mark.parametrize(
    ("f", "kind"),
    [
        (lambda x: float(type(x) is np.ndarray and x.shape == (3,)), "numpy"),
        (lambda x: float(torch.is_tensor(x) and x.shape == (3,)), "torch"),  # refers to torch
    ],
)
def test_the_row_is_an_array_unless_the_function_refers_to_torch(f, kind):
    function = RowFunction(per_row(f), None)
    assert function(X).tolist() == [[1.0]] * 6
    assert function.interfaces == (kind,)


def test_an_annotation_decides():
    def of_arrays(x: np.ndarray):
        return torch.as_tensor(x).sum()

    def of_tensors(x: torch.Tensor):
        return np.asarray(x).sum()

    assert RowFunction(per_row(of_arrays), None).interfaces == ("numpy",)
    assert RowFunction(per_row(of_tensors), None).interfaces == ("torch",)


def test_the_other_kind_is_tried_at_one_row():
    function = RowFunction(per_row(torch.sin), None)
    assert torch.equal(function(X), X.sin())
    assert (function.calls, function.interfaces) == (7, ("torch",))


def test_contexts_seeds_and_sequences_come_row_by_row():
    f = per_row(lambda x, c, t, seed: [x[0] * c[1], t, seed])
    c, t = torch.randn(6, 2), torch.arange(6.0)
    y = RowFunction(f, None)(X, c, t, seed=7).float()
    assert torch.allclose(y, torch.stack((X[:, 0] * c[:, 1], t, torch.full((6,), 7.0)), 1))
    layer = BlackBox(per_row(lambda x: x.cumsum(0)), 3, structure=Sequence(), policy=Fixed(1e-2))
    x = torch.randn(2, 5, 3)
    assert torch.allclose(layer(x), x.cumsum(1), atol=1e-6)
    assert gradient(layer, x, torch.ones(2, 5, 3))[0, 0] == pytest.approx(5, rel=1e-2)


def test_its_structure_is_that_of_the_function():
    def f(x):
        return x**2

    f.structure = Blocks(1, 1)
    assert BlackBox(per_row(f), 3).structure is f.structure
    assert not hasattr(per_row(wave), "structure")


def test_what_remembers_is_restored():
    class Counter:
        def __init__(self):
            self.rows = 0

        def snapshot(self):
            return self.rows

        def restore(self, rows):
            self.rows = rows

        def __call__(self, x):
            self.rows += 1
            if self.rows == 5 and x[0] > 100:
                raise ValueError
            return [x[0], self.rows]

    counter = Counter()
    layer = BlackBox(per_row(counter), 3, policy=Fixed(1e-2))
    assert layer(X)[:, 1].tolist() == [1, 2, 3, 4, 5, 6]
    gradient(layer, X, torch.ones(6, 2))
    assert counter.rows == 12
    with pytest.raises(ValueError, match="state must be None with per_row"):
        BlackBox(per_row(wave), 3, state=torch.zeros(1, 3))
    layer.reset()
    x = X.clone()
    x[4, 0] = 200
    with pytest.raises(BoxError, match="raised ValueError on row 4 of 6"):  # there is no state to go on from
        layer(x)
    assert counter.rows == 0


# ---- what it returns


@pytest.mark.parametrize(
    "f",
    [
        lambda x: float(x[0]),
        lambda x: x[0],
        lambda x: [x[0]],
        lambda x: (float(x[0]),),
        lambda x: x[:1],
        lambda x: np.array(x[0]),
        lambda x: torch.tensor(float(x[0])),
        lambda x: [torch.tensor(float(x[0]))],
    ],
)
def test_kinds_of_outputs(f):
    assert torch.equal(RowFunction(per_row(f), None)(X), X[:, :1])


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (
            lambda x: [1.0] * (1 if x[0] > 1 else 2),
            r"equally many numbers for every row, got shape \[2\] for row 0 and",
        ),
        (lambda x: {"a": x[0], "b": 1}, r"a dict with the keys 'a', 'b'.*in per_row lambda x: \[\*f\(x\).values\(\)\]"),
        (lambda x: "1", r"got str \(for row 0\)"),
        (lambda x: None, "got None, as of a function without return"),
        (lambda x: [x, x], "got a list of 2 arrays"),
        (lambda x: x[None], r"row of inputs, \[6, out_features\], got shape \[6, 1, 3\]"),
        (lambda x: 1j, "complex"),
    ],
)
def test_outputs_that_are_refused(f, says):
    with pytest.raises(BoxError, match=says):
        BlackBox(per_row(f), 3)(X)


def test_the_number_of_outputs_stays():
    function = RowFunction(per_row(wave), 3)
    with pytest.raises(BoxError, match="got shape"):
        function(X)


# ---- what errors cost


@pytest.mark.filterwarnings("ignore:.*(asked again|no finite output)")
@pytest.mark.parametrize(
    "evaluator",
    [Local(), Local(max_rows=1), Local(max_rows=4), Threads(2), lambda: Processes(2)],
    ids=["Local", "1", "4", "Threads", "Processes"],
)
def test_an_error_costs_its_row_and_no_other_is_asked_again(evaluator):
    evaluator = evaluator if isinstance(evaluator, (Local, Threads)) else evaluator()
    with evaluator:
        layer = BlackBox(per_row(hot), 3, policy=Fixed(1e-3), evaluator=evaluator)
        g = gradient(layer, X, torch.ones(6, 2))
    assert layer.last_ok.tolist() == [True, True, True, True, False, True]
    assert dict(layer.stats.errors) == {"ValueError": 3}
    assert layer.stats.calls == layer.stats.evaluations == 6 + 2 + 5 * 6  # asked twice more
    assert layer.stats.retried == 2
    exact = torch.stack((X[:, 0].cos(), X[:, 2], X[:, 1]), 1)
    exact[4] = 0
    assert close(g, exact, 1e-2)


@pytest.mark.filterwarnings("ignore:.*no finite output")
def test_the_warning_names_the_row():
    with pytest.warns(UserWarning, match=r"hot raised ValueError on row 4 of 6, of shape \[3\], \[1.389, .*: too hot"):
        BlackBox(per_row(hot), 3)(X)


def test_errors_at_all_rows_end_it():
    with pytest.raises(BoxError, match=r"raised ZeroDivisionError on row 0 of 6.*division by zero") as caught:
        BlackBox(per_row(lambda x: 1 / 0), 3)(X)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_mistake_ends_it_at_once():
    function = RowFunction(per_row(lambda x: x.nothing()), None)
    with pytest.raises(BoxError, match=r"raised AttributeError on row 0 of 6.*annotate its first parameter"):
        function(X)
    assert function.calls == 2  # with an array, and with a tensor
    with pytest.raises(BoxError, match=r"write lambda x: fn\(a=x\[0\], b=x\[1\]\)"):
        RowFunction(per_row(lambda a, b: a), None)(X)
    with pytest.raises(BoxError, match=r"write per_row\(lambda x: f\(x\[0\]\)\)"):
        RowFunction(per_row(math.sin), None)(X)


def test_memory_that_runs_out_is_not_taken_for_a_failure_of_the_row():
    def full(x):
        raise MemoryError

    with pytest.raises(BoxError, match="out of memory on a single row"):
        BlackBox(per_row(full), 3)(X[:1])


def test_both_ends_of_a_move_with_a_seed_keep_their_errors_apart():
    def noisy(x, seed):
        return [*hot(x), np.random.default_rng(seed).normal()]

    layer = BlackBox(per_row(noisy), 3, policy=Fixed(0.2), evaluator=Local(retries=0))
    x = X.clone()
    x[4, 0] = 0.9  # one end of a move is too hot
    with pytest.warns(UserWarning, match="on row 12 of 18"), pytest.warns(UserWarning, match="no finite output"):
        g = gradient(layer, x, torch.ones(6, 3))
    assert layer.stats.failures == 1
    exact = torch.stack((x[:, 0].cos(), x[:, 2], x[:, 1]), 1)
    exact[4, 0] = g[4, 0]  # of the other end and the row itself, which had another seed
    assert close(g, exact, 0.1)


def test_a_journal_has_each_error_at_its_row(tmp_path):
    with Journal(Local(retries=0), tmp_path / "run.journal") as journal:
        layer = BlackBox(per_row(hot), 3, evaluator=journal).eval()
        with pytest.warns(UserWarning, match="too hot"), pytest.warns(UserWarning, match="no finite output"):
            y = layer(X)
        assert y.isnan().any(1).tolist() == [False] * 4 + [True, False]
        points, outputs = journal.to_arrays()
    assert len(points) == 5
    assert np.allclose(outputs, y[[0, 1, 2, 3, 5]])


# ---- the wrapper itself


def test_what_is_refused():
    with pytest.raises(TypeError, match="f must be callable, got int"):
        per_row(3)
    with pytest.raises(TypeError, match="module Linear takes rows, so give it to BlackBox as it is"):
        per_row(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="at_once must be a positive integer"):
        per_row(wave, at_once=0)


def test_it_can_be_called_named_copied_and_sent():
    box = per_row(functools.partial(wave))
    assert (box.__name__, repr(box)) == ("wave", "per_row(wave)")
    assert box([[0.0, 2.0, 3.0]]) == [[0.0, 6.0]]
    with pytest.raises(ValueError, match="too hot"):
        per_row(hot)([[2.0, 0, 0]])
    for other in (copy.deepcopy(box), pickle.loads(pickle.dumps(box)), per_row(box)):
        assert other([[0.0, 2.0, 3.0]]) == [[0.0, 6.0]]
    sent = pickle.loads(cloudpickle.dumps(per_row(lambda x: x[0])))
    assert RowFunction(sent, None)(X).shape == (6, 1)


def test_probe_and_check_take_it():
    report = bondgrad.probe(per_row(wave), X.repeat(4, 1), budget=2000)
    assert "BlackBox(\n    bondgrad.per_row(wave)," in report.code
    assert bondgrad.check(BlackBox(per_row(wave), 3, policy=Fixed(1e-2)), X.repeat(4, 1)).verdict == "right"


# ---- functions of others


def test_functions_of_scipy():
    optimize, special = pytest.importorskip("scipy.optimize"), pytest.importorskip("scipy.special")
    x = X.double()
    y = BlackBox(per_row(optimize.rosen), 3)(x)
    assert y[:, 0].tolist() == pytest.approx([optimize.rosen(row) for row in x.numpy()])
    layer = BlackBox(functools.partial(special.jv, 1), 3, policy=Fixed(1e-3))
    assert close(gradient(layer, x, torch.ones(6, 3)), torch.from_numpy(special.jvp(1, x.numpy())))
    with pytest.raises(BoxError, match=r"function of one sample, give it as bondgrad\.per_row"):
        BlackBox(optimize.rosen, 3)(x)


def test_estimators_of_sklearn():
    forests = pytest.importorskip("sklearn.ensemble")
    x, y = np.random.default_rng(0).normal(size=(2, 50, 3))
    many = forests.ExtraTreesRegressor(5, random_state=0).fit(x, y)
    one = forests.ExtraTreesRegressor(5, random_state=0).fit(x, y[:, 0])
    assert np.allclose(BlackBox(many.predict, 3)(torch.from_numpy(x)), many.predict(x))
    single = BlackBox(per_row(lambda x: one.predict(x[None])), 3)
    assert np.allclose(single(torch.from_numpy(x))[:, 0], one.predict(x))
    with pytest.raises(BoxError, match=r"got shape \[50\] \(add a dimension: y\[..., None\]\)"):
        BlackBox(one.predict, 3)(torch.from_numpy(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_circuit_of_pennylane():
    qml = pytest.importorskip("pennylane")

    @qml.qnode(qml.device("default.qubit", wires=2))
    def circuit(angles):
        qml.RX(angles[0], wires=0)
        qml.RY(angles[1], wires=1)
        return [qml.expval(qml.PauliZ(wire)) for wire in range(2)]

    x = X[:, :2].double()
    layer = BlackBox(per_row(circuit), 2, policy=Fixed(math.pi / 2))
    assert torch.allclose(layer(x), x.cos())
    assert gradient(layer, x, torch.ones(6, 2)).abs().max() > 0.1
