"""Answers of forward passes that are run again: which one is found, and for how long it is kept."""

import math

import pytest
import torch

from bondgrad import BoxError
from bondgrad.torch_support._checkpoint import Answers, in_backward, in_checkpoint


class Box:
    """Answers with the number of the call, and notes what it was told."""

    def __init__(self):
        self.calls, self.told = 0, []

    def __call__(self, learns):
        self.calls += 1
        self.told.append(learns)
        return self.calls


def in_a_backward_pass(work):
    """What `work` gives when it is called in a backward pass."""
    x, results = torch.zeros(1, requires_grad=True), []
    y = x * 1
    y.register_hook(lambda _: results.append(work()))
    y.sum().backward()
    return results[0]


def ask(answers, box, *rows, ordered=False, graded=True):
    return answers.answer(rows, ordered, graded, box)


ROWS = torch.tensor([[1.0, math.nan]])


def test_a_backward_pass_is_noticed():
    assert not in_backward()
    assert in_a_backward_pass(in_backward)


def test_an_answer_is_found_until_it_is_forgotten():
    answers, box = Answers(), Box()
    value, ticket = ask(answers, box, ROWS)
    assert (value, len(answers)) == (1, 1)
    for _ in range(2):
        assert in_a_backward_pass(lambda: ask(answers, box, ROWS.clone())) == (1, ticket)
    answers.forget(ticket)
    assert len(answers) == 0
    assert in_a_backward_pass(lambda: ask(answers, box, ROWS)) == (2, 0)  # asked again
    assert len(answers) == 0  # and not kept


@pytest.mark.parametrize(
    "others",
    [
        (torch.tensor([[1.0, 2.0]]),),
        (torch.tensor([[2.0, math.nan]]),),
        (ROWS.double(),),
        (ROWS.view(2, 1),),
        (ROWS, ROWS),
        (torch.tensor([[math.nan, 1.0]]),),
        (ROWS.to("meta"),),
    ],
)
def test_other_rows_have_other_answers(others):
    answers, box = Answers(), Box()
    ask(answers, box, ROWS)
    ask(answers, box, ROWS[:1], ROWS)
    ask(answers, box, ROWS)
    answers.forget(2)
    if len(others) == 1:
        assert in_a_backward_pass(lambda: ask(answers, box, *others))[1] == 0
    else:
        assert in_a_backward_pass(lambda: ask(answers, box, *others))[0] == 4


def test_of_several_the_latest_that_found_the_same_random_numbers():
    answers, box = Answers(), Box()
    states = []
    for _ in range(3):
        states.append(torch.get_rng_state())
        ask(answers, box, ROWS)
        torch.rand(1)  # drawn after the box
    torch.set_rng_state(states[1])
    assert in_a_backward_pass(lambda: ask(answers, box, ROWS))[0] == 2
    torch.manual_seed(123)  # as none of them found them
    assert in_a_backward_pass(lambda: ask(answers, box, ROWS))[0] == 3


def test_random_numbers_are_as_the_box_left_them():
    answers = Answers()
    torch.manual_seed(0)
    start = torch.get_rng_state()
    ask(answers, lambda learns: torch.rand(1), ROWS)
    after = torch.get_rng_state()
    torch.set_rng_state(start)
    in_a_backward_pass(lambda: ask(answers, None, ROWS))
    assert torch.equal(torch.get_rng_state(), after)


def test_a_box_that_remembers_is_not_guessed_about():
    answers, box = Answers(), Box()
    ask(answers, box, ROWS, ordered=True)
    assert in_a_backward_pass(lambda: ask(answers, box, ROWS, ordered=True))[0] == 1
    ask(answers, box, ROWS, ordered=True)
    ask(answers, box, ROWS + 1, ordered=True)
    with pytest.raises(BoxError, match="cannot be told apart"):
        in_a_backward_pass(lambda: ask(answers, box, ROWS, ordered=True))
    assert len(answers) == 1  # of the other rows
    answers.clear()
    assert len(answers) == 0


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("graded", [True, False])
def test_what_a_layer_learns_from(reentrant, graded):
    """A first run that is graded, or that of the reentrant kind, which is run without gradients."""
    answers, box = Answers(), Box()
    with torch.set_grad_enabled(not reentrant):
        ask(answers, box, ROWS, graded=graded)
    assert box.told == [graded or reentrant]
    answers.clear()
    in_a_backward_pass(lambda: ask(answers, box, ROWS, graded=graded))
    assert box.told[1] is False  # run again, it was learnt from before


@pytest.mark.parametrize(("graded", "enabled", "left"), [(True, True, 1), (False, True, 0), (False, False, 1)])
def test_an_answer_that_no_gradient_will_use_is_forgotten_at_once(graded, enabled, left):
    answers, box = Answers(), Box()
    ask(answers, box, ROWS)

    def again():
        with torch.set_grad_enabled(enabled):
            return ask(answers, box, ROWS, graded=graded)

    assert in_a_backward_pass(again)[0] == 1
    assert len(answers) == left


def test_the_oldest_go_first():
    answers, box = Answers(), Box()
    rows = [torch.full((1, 1), float(i)) for i in range(258)]
    for x in rows:
        ask(answers, box, x)
    assert len(answers) == 256
    assert in_a_backward_pass(lambda: ask(answers, box, rows[2]))[0] == 3
    assert in_a_backward_pass(lambda: ask(answers, box, rows[1]))[1] == 0


def test_a_checkpoint_is_seen_from_inside():
    def seen(x):
        found.append(in_checkpoint())
        return x * 2

    found, x = [], torch.zeros(1, requires_grad=True)
    seen(x)
    torch.utils.checkpoint.checkpoint(seen, x, use_reentrant=True)
    torch.utils.checkpoint.checkpoint(seen, x, use_reentrant=False)
    with torch.no_grad():
        torch.utils.checkpoint.checkpoint(seen, x, use_reentrant=False)  # which nobody runs again
    with torch.inference_mode():
        torch.utils.checkpoint.checkpoint(seen, x, use_reentrant=False)
    assert found == [False, True, True, False, False]
