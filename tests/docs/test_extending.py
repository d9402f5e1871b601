"""The page about parts of one's own: its code runs, prints what it says, has public names, is as long as it says."""

import ast
import contextlib
import copy
import importlib
import io
import re
from pathlib import Path

import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.evaluators import Local
from bondgrad.metrics import exact_vjp
from bondgrad.policies import Fixed
from bondgrad.structure import Blocks, Sequence
from bondgrad.testing.boxes import Sparse
from tests.calling.test_memory import Device, expected, stream
from tests.helpers import close, gradient

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL)


def test_the_code_prints_what_the_page_says():
    assert len(BLOCKS) == 11
    torch.manual_seed(0)
    names = {}
    for code, said in BLOCKS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)  # noqa: S102
        assert printed.getvalue() == said


def test_parts_are_as_long_as_the_page_says():
    parts = re.findall(r"(\d+) lines:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(parts) == 4
    for lines, code in parts:
        assert int(lines) == sum(bool(line.strip()) for line in code.splitlines())


@pytest.mark.parametrize("code", [code for code, _ in BLOCKS])
def test_only_public_names_are_used(code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("bondgrad"):
            public = importlib.import_module(node.module).__all__
            assert {alias.name for alias in node.names} <= set(public)
        if isinstance(node, ast.Attribute):
            # `_replace` is a public method of named tuples.
            assert not node.attr.startswith("_") or node.attr.endswith("__") or node.attr == "_replace"


@pytest.fixture(scope="module")
def parts():
    """The classes of the page."""
    names = {}
    for code, _ in BLOCKS:
        if "\nclass " in code:
            exec(code, names)  # noqa: S102
    return names


def test_the_estimator_with_structures_memory_and_calibrated_steps(parts):
    four_point = parts["FourPoint"]()
    pattern = torch.rand(9, 12, generator=torch.Generator().manual_seed(0)) < 0.2
    for settings in ({"policy": "calibrated"}, {"policy": Fixed(1e-2), "evaluator": Local(max_rows=7)}):
        exact = Sparse(pattern)
        layer = BlackBox(exact, 12, estimator=four_point, structure=pattern, seed=0, **settings)
        x, gy = torch.randn(16, 12), torch.randn(16, 9)
        assert close(gradient(layer, x, gy), exact.vjp(x, gy))
    layer = BlackBox(Device(), 3, estimator=four_point, policy=Fixed(1e-3))
    xs, gys = stream(3)
    for x, gy, (_, g) in zip(xs, gys, expected(xs, gys), strict=True):
        assert close(gradient(layer, x, gy), g, 1e-6)
    layer = BlackBox(leaky, 2, estimator=four_point, structure=Sequence(), state=torch.zeros(1, 2), policy=Fixed(1e-2))
    x, gy = torch.randn(2, 4, 5, 2)
    assert close(gradient(layer, x, gy), exact_vjp(lambda x: leaky(x, torch.zeros(4, 2))[0], x, gy))


def leaky(x, state):
    y = []
    for row in x.unbind(1):
        state = 0.5 * state + torch.sin(row)
        y.append(state)
    return torch.stack(y, 1), state


def test_a_module_that_fails_costs_its_own_inputs_only(parts):
    def fn(x):
        return torch.where(torch.tensor([True, False, False]) & (x > 0), torch.nan, torch.sin(x))

    layer = BlackBox(fn, 3, estimator=parts["FourPoint"](), structure=Blocks(1, 1), policy=Fixed(1e-2))
    x = torch.tensor([[-1e-3, 0.5, 1.0], [-0.015, 0.1, 0.2], [-1.0, 1.0, 2.0]])
    with pytest.warns(UserWarning, match="no finite output"):
        g = gradient(layer, x, torch.ones(3, 3))
    assert close(g[:, 1:], x[:, 1:].cos(), 1e-4)
    assert close(g, x.cos(), 1e-2)


def test_the_evaluator_with_memory_seeds_and_copies(parts):
    xs, gys = stream(3)
    layer = BlackBox(Device(), 3, evaluator=parts["ThreadPool"](4), policy=Fixed(1e-5))
    for x, gy, (_, g) in zip(xs, gys, expected(xs, gys), strict=True):
        assert close(gradient(layer, x, gy), g, 1e-4)
    layer = BlackBox(lambda x, seed: torch.sin(x) + seed % 7, 3, evaluator=parts["ThreadPool"](4), policy="calibrated")
    other = copy.deepcopy(layer)
    assert other.evaluator is layer.evaluator
    x = torch.randn(8, 3)
    assert close(gradient(other, x, torch.ones(8, 3)), x.cos(), 1e-2)
    make, arguments = parts["ThreadPool"](3, max_rows=2, retries=None).__reduce__()
    again = make(*arguments)
    assert (again.workers, again.max_rows, again.retries) == (3, 2, None)


def test_rows_of_the_evaluator_are_asked_again_and_mistakes_are_raised(parts):
    calls = []

    def flaky(x: torch.Tensor):
        calls.append(x.tolist())
        if calls.count(calls[-1]) == 1:  # nothing comes at first
            raise RuntimeError("the line is busy")
        return torch.sin(x)

    layer = BlackBox(flaky, 3, evaluator=parts["ThreadPool"](2, max_rows=1), policy=Fixed(1e-2))
    x = torch.randn(4, 3)
    with pytest.warns(UserWarning, match="0 remained without an output, since the box flaky raised RuntimeError"):
        assert close(gradient(layer, x, torch.ones(4, 3)), x.cos())
    assert layer.stats.failures == 0
    assert {len(rows) for rows in calls} == {1}
    assert layer.stats.evaluations == len(calls) == 2 * (4 + 24)
    assert layer.stats.retried == layer.stats.errors["RuntimeError"] == 4 + 24
    assert [worker.worker for worker in layer.stats.workers] == [0, 1]

    def wrong(x: torch.Tensor):
        calls.append(len(x))
        return x.nothing_of_the_kind

    calls.clear()
    with pytest.raises(BoxError, match="nothing_of_the_kind"):
        BlackBox(wrong, 3, evaluator=parts["ThreadPool"](1))(x[:1])
    assert len(calls) == 1


def test_the_state_of_the_policy_is_saved(parts):
    layers = [BlackBox(torch.sin, 3, policy=parts["RelativeStep"](), seed=seed) for seed in (0, 1)]
    for x in torch.randn(3, 8, 3):
        gradient(layers[0], x, torch.ones(8, 3))
    layers[1].load_state_dict(layers[0].state_dict())
    assert torch.equal(*(gradient(layer, x, torch.ones(8, 3)) for layer in layers))
    assert layers[0].policy_state.rows > 20
