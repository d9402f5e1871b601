"""The two kinds of memory by themselves: two streams each, of training and of evaluation."""

import copy

import pytest
import torch

from bondgrad import BoxError
from bondgrad.calling._function import RowFunction
from bondgrad.calling._memory import ExplicitState, InternalState, StateRecorder, find_memory

CPU = torch.device("cpu")


def before(memory, rows, training=True):
    return [leaf.tolist() for leaf in memory.before(rows, training, CPU)]


def two_leaves():
    return ExplicitState((torch.tensor([1.0]), torch.tensor([[2.0]])))


def test_a_state_begins_for_any_number_of_rows_or_for_its_own():
    memory = two_leaves()
    assert before(memory, 3) == [[1, 1, 1], [[2], [2], [2]]]
    assert before(memory, 1) == [[1], [[2]]]
    own = ExplicitState(torch.tensor([1.0, 2.0]))
    assert before(own, 2) == [[1, 2]]
    with pytest.raises(BoxError, match="remembers 2 rows, but was given 3: state must be for that many rows, or for"):
        before(own, 3)


def test_each_mode_has_its_own_stream():
    memory = two_leaves()
    memory.advance((torch.tensor([3.0, 4.0]), torch.tensor([[5.0], [6.0]])), training=True)
    assert before(memory, 2, training=True) == [[3, 4], [[5], [6]]]
    assert before(memory, 2, training=False) == [[1, 1], [[2], [2]]]
    memory.advance((torch.tensor([7.0]), torch.tensor([[8.0]])), training=False)
    assert before(memory, 1, training=False) == [[7], [[8]]]
    memory.switch(training=True)  # which goes on where it was
    assert before(memory, 2, training=True) == [[3, 4], [[5], [6]]]
    assert before(memory, 1, training=False) == [[7], [[8]]]
    memory.switch(training=False)  # which begins anew
    assert before(memory, 1, training=False) == [[1], [[2]]]
    assert before(memory, 2, training=True) == [[3, 4], [[5], [6]]]
    memory.reset(training=True)
    assert before(memory, 2, training=True) == [[1, 1], [[2], [2]]]


def test_a_stream_has_the_rows_that_it_had_until_it_begins_anew():
    memory = two_leaves()
    memory.advance((torch.tensor([3.0]), torch.tensor([[5.0]])), training=True)
    with pytest.raises(BoxError, match="remembers 1 rows, but was given 2: its batches must be of one size"):
        before(memory, 2)
    memory.reset(training=True)
    assert before(memory, 2) == [[1, 1], [[2], [2]]]
    assert before(memory, 1) == [[1], [[2]]]
    memory.went_on(training=True)  # as after the replay of a graph, which changes tensors only
    with pytest.raises(BoxError, match="remembers 1 rows, but was given 2"):
        before(memory, 2)


def test_what_is_given_out_may_be_written_into():
    memory = two_leaves()
    for _ in range(2):
        given = memory.before(3, True, CPU)
        assert given[0].tolist() == [1, 1, 1]
        given[0][0] = 9
    state = torch.tensor([3.0])
    memory.advance((state, torch.zeros(1, 1)), training=True)
    memory.before(1, True, CPU)[0][0] = 9
    state[0] = 8
    assert before(memory, 1)[0] == [3]


def test_the_places_of_a_stream_stay_while_its_kind_stays():
    memory = two_leaves()
    assert memory.places(True) is None
    memory.advance((torch.zeros(3), torch.zeros(3, 1)), training=True)
    places = memory.places(True)
    assert len(places) == 2
    assert memory.places(False) is None
    memory.advance((torch.ones(3), torch.ones(3, 1)), training=True)
    memory.reset(training=True)
    assert memory.places(True) == places
    assert before(memory, 3)[0] == [1, 1, 1]
    memory.advance((torch.ones(4), torch.ones(4, 1)), training=True)
    assert memory.places(True) != places
    memory.advance((torch.ones(4).double(), torch.ones(4, 1)), training=True)
    memory.reset(training=True)  # from another dtype there is no way back in place
    assert memory.places(True) is None
    assert before(memory, 4)[0] == [1, 1, 1, 1]


def test_both_streams_are_saved_unless_they_are_at_their_beginning():
    memory, other = two_leaves(), two_leaves()
    assert memory.get_extra_state() == {"train": None, "eval": None}
    memory.advance((torch.tensor([3.0]), torch.tensor([[4.0]])), training=False)
    saved = memory.get_extra_state()
    assert saved["train"] is None
    assert [leaf.tolist() for leaf in saved["eval"]] == [[3], [[4]]]
    other.advance((torch.tensor([5.0]), torch.tensor([[6.0]])), training=True)
    other.set_extra_state(saved)
    assert before(other, 1, training=True) == [[1], [[2]]]
    assert before(other, 1, training=False) == [[3], [[4]]]
    memory.reset(training=False)
    assert memory.get_extra_state() == {"train": None, "eval": None}
    with pytest.raises(ValueError, match="a state of 1 tensors does not fit a box with 2"):
        memory.set_extra_state({"train": (torch.zeros(1),), "eval": None})


@pytest.mark.parametrize("state", [(), {}, torch.tensor(1.0), (torch.zeros(1), torch.tensor(1.0))])
def test_a_state_has_rows(state):
    with pytest.raises(ValueError, match="tensors with one entry per row first"):
        ExplicitState(state)


def test_a_state_is_of_tensors():
    with pytest.raises(ValueError, match="state must be made of tensors or arrays, got 3"):
        ExplicitState(3)


class Device:
    """Remembers a number."""

    def __init__(self):
        self.state = 0

    def snapshot(self):
        return self.state

    def restore(self, snapshot):
        self.state = snapshot


def test_a_device_changes_between_its_streams():
    device = Device()
    memory = InternalState(device, training=True)
    device.state = 5
    memory.switch(training=True)  # no change
    assert device.state == 5
    memory.switch(training=False)
    assert device.state == 0
    device.state = 7
    memory.switch(training=True)
    assert device.state == 5
    assert memory.before(1, False, CPU) == 0  # evaluation begins anew
    memory.reset(training=True)
    assert device.state == 0


def test_a_device_that_began_with_evaluation_trains_from_its_beginning():
    device = Device()
    memory = InternalState(device, training=False)
    device.state = 7
    memory.switch(training=True)
    assert device.state == 0


def test_a_device_is_put_back():
    device = Device()
    memory = InternalState(device, training=True)
    device.state = 5
    with pytest.raises(OSError, match="no power"), memory.kept():
        device.state = 6
        raise OSError("no power")
    assert device.state == 5
    assert memory.from_snapshot(3, lambda x, seed: x + device.state)(torch.zeros(1)).tolist() == [3]


@pytest.mark.parametrize(("training", "now", "other"), [(True, 5, 7), (False, 7, 5)])
def test_the_streams_of_a_device_are_loaded_into_the_mode_that_it_is_in(training, now, other):
    device, copied = Device(), Device()
    memory, loaded = InternalState(device, training=False), InternalState(copied, training)
    device.state = 7
    memory.switch(training=True)
    device.state = 5
    loaded.set_extra_state(memory.get_extra_state())
    assert copied.state == now
    assert loaded.get_extra_state() == {"now": now, "other": other, "training": training}


def test_a_stream_that_was_never_used_is_loaded_as_its_beginning():
    device = Device()
    memory = InternalState(device, training=False)
    device.state = 7
    memory.set_extra_state({"now": 5, "other": None, "training": True})
    assert device.state == 0
    memory.switch(training=True)
    assert device.state == 5


def test_one_device_has_one_memory():
    device, other = Device(), Device()
    memory = find_memory(device, None, True)
    assert find_memory(device, None, True) is memory
    assert find_memory(device.snapshot, None, True) is memory  # a method of it
    assert find_memory(other, None, True) is not memory
    assert copy.deepcopy(memory).get_extra_state() == {"now": 0, "other": None, "training": True}
    assert find_memory(torch.sin, None, True) is None
    assert isinstance(find_memory(torch.sin, torch.zeros(1), True), ExplicitState)
    with pytest.raises(ValueError, match="keeps its own state"):
        find_memory(device, torch.zeros(1), True)


@pytest.mark.parametrize("methods", [("snapshot",), ("restore",)])
def test_a_memory_needs_both_methods(methods):
    device = type("Half", (), {name: lambda self: None for name in methods})()
    assert find_memory(device, None, True) is None


def test_states_after_the_last_calls_are_put_together():
    recorder = StateRecorder(RowFunction(lambda x, s: (x, s + x), None, form=0))
    x = torch.arange(6.0).view(6, 1)
    recorder(x[:3], torch.zeros(3, 1))  # in vain
    recorder(x[:2], torch.ones(2, 1))
    recorder(x[2:5], torch.ones(3, 1))
    assert recorder.take(5)[0].tolist() == [[1], [2], [3], [4], [5]]
    recorder(x[:2], torch.zeros(2, 1))
    assert recorder.take(2)[0].tolist() == [[0], [1]]
