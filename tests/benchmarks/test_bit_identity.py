"""The comparing in benchmarks/bit_identity.py: the first operation that differs is found, and nothing else is."""

from pathlib import Path

import pytest
import torch
from bit_identity import SEED, Tally, settings_of
from traces import Recorder, Trace, captured_against_eager, differences, first_difference

from bondgrad.experiments.trainer import Run


def trace(*steps, evaluations=(), names=("batch", "layer", "loss")):
    made = Trace(evaluations=list(evaluations))
    for step in steps:
        made.add(names, list(step), float(step[-1]))
    return made


def test_the_first_operation_that_differs():
    reference = trace((1, 2, 3), (4, 5, 6), (7, 8, 9))
    assert first_difference(reference, trace((1, 2, 3), (4, 5, 6), (7, 8, 9))) is None
    found = first_difference(reference, trace((1, 2, 3), (4, 0, 0), (0, 0, 0)))
    assert (found["step"], found["operation"], found["the one before, still the same"]) == (1, "layer", "batch")
    assert found["operations that differ"] == "2 of 3"
    assert found["loss"] == {"reference": (6.0).hex(), "here": (0.0).hex()}
    found = first_difference(reference, trace((0, 2, 3), (4, 5, 6), (7, 8, 9)))
    assert (found["step"], found["operation"], found["the one before, still the same"]) == (0, "batch", None)
    with pytest.raises(ValueError, match="3 and 1 steps"):
        first_difference(reference, trace((1, 2, 3)))


def test_evaluations_are_compared_where_all_steps_are_the_same():
    a, b = (trace((1, 2, 3), evaluations=[("0x1p0", "0x1p1"), ("0x1p0", last)]) for last in ("0x1p1", "0x1p2"))
    assert first_difference(a, b)["epoch"] == 2
    assert first_difference(a, a) is None


def test_a_captured_run_is_compared_with_its_eager_twin():
    eager = trace((1, 2, 3), (1, 2, 3))
    order = ("layer", "batch", "gradient that only a capture sees", "loss")
    same, other = trace((2, 1, 7, 3), (2, 1, 7, 3), names=order), trace((2, 1, 7, 3), (2, 1, 7, 4), names=order)
    traces = {"A, captured": same, "A, eager": eager, "B, captured": other, "B, eager": eager}
    found = captured_against_eager(traces)
    assert {name: (entry["step"], entry["operation"]) for name, entry in found.items()} == {"B, captured": (1, "loss")}


def test_processes_are_counted_once_and_operations_by_run():
    reference = {"A": trace((1, 2, 3)), "B": trace((1, 2, 3), evaluations=[("0x1p0", "0x1p1")])}
    other = {"A": trace((1, 0, 3)), "B": trace((1, 2, 3), evaluations=[("0x1p0", "0x1p2")])}
    tally = Tally()
    tally.add(1, differences(reference, reference))
    tally.add(2, differences(reference, other))
    assert tally.processes == 1
    epoch = "B, epoch 1: evaluation after the epoch, all steps being the same"
    assert tally.numbers()["first operations"] == {"A, step 0: layer": 1, epoch: 1}
    assert [entry["process"] for entry in tally.described] == [2]


def test_a_recorder_finds_the_layer_in_which_a_run_was_disturbed():
    def recorded(disturbed):
        run = Run(settings, SEED, Path(), torch.device("cpu"))
        recorder = Recorder(run)
        if disturbed:  # as a hook that comes before the recorder's would see it: from the second step on
            layer = run.parts.read_out[1]
            layer.register_forward_hook(
                lambda _, __, y: y + 1e-6 if recorder.trace.steps and recorder._within else y, prepend=True
            )
        while not run.done:
            run.turn(1, timed=False)
        return recorder.finished()

    settings = settings_of("cpu", 1, 3)[0]
    reference = recorded(disturbed=False)
    assert len(reference.steps) == 3
    assert first_difference(reference, recorded(disturbed=False)) is None
    found = first_difference(reference, recorded(disturbed=True))
    assert (found["step"], found["operation"]) == (1, "read_out.1 (Tanh), output")
    assert found["the one before, still the same"] == "read_out.0 (Linear), output"
