"""Boxes that end the process in which they are, and requests that are ended while rows are evaluated."""

import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.calling._function import RowFunction
from bondgrad.evaluators import Driver, Local, Processes, Threads
from tests.evaluators.boxes import Leaves, leaving_factory

pytest.importorskip("pebble")
pytest.importorskip("cloudpickle")


@pytest.fixture(scope="module")
def two():
    """Two processes that all tests of this module share."""
    with Processes(2, max_rows=1) as evaluator:
        yield evaluator


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_box_that_ends_its_process_costs_its_row_and_not_the_program(two, error):
    points = torch.zeros(8, 2)
    points[3, 0] = 2.0
    layer = BlackBox(Leaves(error), 2, evaluator=two)
    ended, lost = f"ended while it evaluated 1 row: {error.__name__}: the box leaves", "1 row got no finite output"
    with pytest.warns(UserWarning, match=ended), pytest.warns(UserWarning, match=lost):
        y = layer(points)
    assert layer.last_ok.tolist() == [True] * 3 + [False] + [True] * 4
    assert torch.equal(y[layer.last_ok], points.sin()[layer.last_ok])
    assert layer.stats.errors == {error.__name__: 3}
    assert "raise self.error" in layer.stats.tracebacks[error.__name__]


def test_rows_that_a_mistake_ended_are_counted(two):
    layer = BlackBox(lambda x: None, 2, evaluator=two)
    with pytest.raises(BoxError, match="must return"):
        layer(torch.zeros(4, 2))
    assert 1 <= layer.stats.evaluations <= 4
    assert sum(worker.rows for worker in layer.stats.workers) == layer.stats.evaluations


def test_a_box_that_has_ended_its_process_is_made_anew(tmp_path):
    made = tmp_path / "made"

    def factory():
        with made.open("a") as file:
            file.write("x")
        return Leaves()

    with Processes(1, factory, max_rows=1, spares=0, retries=0) as evaluator:
        layer = BlackBox(None, 2, evaluator=evaluator)
        with pytest.warns(UserWarning, match="1 row got no"):
            layer(torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 0.0]]))
    assert made.read_text() == "xx"


def test_a_factory_that_ends_its_process_is_an_error():
    failed = pytest.raises(BoxError, match="could not make its box: SystemExit: the licence server is down")
    with Processes(1, leaving_factory, spares=0) as evaluator, failed:
        BlackBox(None, 2, evaluator=evaluator)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("evaluator", [Local(max_rows=1), Threads(2, max_rows=1)])
def test_a_box_in_this_process_may_end_the_program(evaluator, error):
    points = torch.zeros(8, 2)
    points[3, 0] = 2.0
    with pytest.raises(error, match="the box leaves"):
        Driver(evaluator).ask(RowFunction(Leaves(error), None), points)
