"""Sign accuracy, and writing it down."""

import math

import pytest
import torch

from bondgrad import BlackBox, TensorBoard, sign_accuracy
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
