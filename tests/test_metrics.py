"""Sign accuracy, and writing it down."""

import math

import pytest
import torch

from bondgrad import BlackBox, TensorBoard, sign_accuracy
from bondgrad.evaluators import Local, Threads
from tests.helpers import gradient


def test_sign_accuracy():
    reference = torch.tensor([1.0, -1.0, 0.0, 2.0, -3.0])
    assert sign_accuracy(reference, reference) == 1
    assert sign_accuracy(-reference, reference) == 0
    assert sign_accuracy(torch.tensor([5.0, 5.0, 5.0, 0.0, math.nan]), reference) == 0.25
    assert sign_accuracy(torch.ones(2), torch.zeros(2)).isnan()
    with pytest.raises(ValueError, match="same shape"):
        sign_accuracy(torch.ones(2), torch.ones(3))


def test_tensorboard_files_hold_what_the_box_did(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    layer = BlackBox(torch.sin, 3, policy="bond")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        layer.register_step_hook(TensorBoard(writer, tag="device", every=2, exact=torch.sin))
        for _ in range(5):
            gradient(layer, torch.randn(4, 3), torch.ones(4, 3))
    events = EventAccumulator(str(tmp_path)).Reload()
    evaluations = events.Scalars("device/evaluations")
    assert [e.step for e in evaluations] == [0, 2, 4]
    assert [e.value for e in evaluations] == [28, 84, 140]
    assert all(e.value > 0.9 for e in events.Scalars("device/sign_accuracy"))
    assert {"device/calls", "device/failures", "device/lower", "device/upper", "device/step"} <= set(
        events.Tags()["scalars"]
    )


def written(path, layer, steps=2):
    """The last values that a layer writes, by name."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tensorboard.SummaryWriter(str(path)) as writer:
        layer.register_step_hook(TensorBoard(writer))
        for _ in range(steps):
            gradient(layer, torch.randn(4, 3), torch.ones(4, 3))
    events = EventAccumulator(str(path)).Reload()
    return {name: events.Scalars(name)[-1].value for name in events.Tags()["scalars"]}


def test_tensorboard_files_hold_what_each_worker_did(tmp_path):
    with Threads(2, max_rows=2) as evaluator:
        layer = BlackBox(torch.sin, 3, policy="bond", evaluator=evaluator)
        values = written(tmp_path, layer)
        stats = layer.stats
    assert len(stats.workers) == 2
    assert values["box/retried"] == values["box/wasted"] == 0
    for worker in stats.workers:
        names = {"rows", "busy", "latency_median", "latency_0.99", "failures"}
        found = {name: values[f"box/worker_{worker.worker}/{name}"] for name in names}
        assert (found["rows"], found["failures"]) == (worker.rows, 0)
        assert 0 < found["latency_median"] <= found["latency_0.99"]
        assert 0 < found["busy"] <= 1
    assert not any("/errors/" in name for name in values)


def test_tensorboard_files_hold_failures_by_kind(tmp_path):
    calls = 0

    def fails(x: torch.Tensor):
        nonlocal calls
        calls += 1
        if calls in (3, 7, 8):
            raise OSError("no answer") if calls == 3 else TimeoutError("late")
        return torch.sin(x)

    layer = BlackBox(fails, 3, policy="bond", evaluator=Local(max_rows=1))
    with pytest.warns(UserWarning, match="asked again"):
        values = written(tmp_path, layer)
    assert (values["box/errors/OSError"], values["box/errors/TimeoutError"]) == (1, 2)
    assert values["box/retried"] == layer.stats.retried >= 3  # pairs stay together
    assert not any("worker" in name for name in values)  # there is one


def test_tensorboard_files_hold_what_was_wasted(tmp_path):
    layer = BlackBox(torch.sin, 3, policy="bond", eager=True)
    gradient(layer, torch.randn(4, 3), torch.ones(4, 3))  # the width of the answers is not known before
    layer(torch.randn(4, 3, requires_grad=True))  # whose gradient is never asked for
    assert written(tmp_path, layer)["box/wasted"] == layer.stats.wasted == 24
