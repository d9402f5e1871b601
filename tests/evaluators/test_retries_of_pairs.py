"""Pairs of rows for which no output came: both ends are asked again."""

import pytest
import torch

from bondgrad.evaluators import Answer, evaluate_rows
from tests.evaluators.test_retries import Faulty, Recording, ask


def test_both_ends_of_a_pair_are_asked_again_and_are_of_one_attempt():
    def answer(request):
        y = request.points + 100 * request.attempt
        lost = {0: (3, 4), 1: (5,), 2: (4, 5)}[request.attempt]
        return Answer(y, torch.tensor([row not in lost for row in request.points[:, 0].tolist()]))

    evaluator = Recording(answer)
    y, ok = ask(torch.sin, 8, evaluator, pairs=True)
    assert [r.points[:, 0].tolist() for r in evaluator.requests[1:]] == [[2, 3, 4, 5], [4, 5]]
    assert all(request.pairs for request in evaluator.requests)
    # 2 and 3 are of the second attempt; of 4 and 5 the last attempt, which has neither, is not the best.
    assert y[:, 0].tolist()[:4] == [0, 1, 102, 103]
    assert ok.tolist() == [True] * 4 + [True, False, True, True]
    assert y[4] == 104
    assert y[5].isnan()


def test_the_last_row_of_an_odd_number_is_asked_again_alone():
    def answer(request):
        y = request.points + 100 * request.attempt
        lost = {0: (3, 6), 1: (2, 6), 2: (1,)}[request.attempt]
        return Answer(y, torch.tensor([row not in lost for row in request.points[:, 0].tolist()]))

    evaluator = Recording(answer)
    y, ok = ask(torch.sin, 7, evaluator, pairs=True)
    assert [r.points[:, 0].tolist() for r in evaluator.requests[1:]] == [[2, 3, 6], [2, 3, 6]]
    assert y[:, 0].tolist() == [0, 1, 202, 203, 4, 5, 206]
    assert ok is None


def test_pairs_are_divided_down_to_pairs():
    fn = Faulty(5)
    evaluator = Recording(evaluate_rows, max_rows=8, retries=1)
    with pytest.warns(UserWarning, match="1 remained"):
        _, ok = ask(fn, 16, evaluator, pairs=True)
    assert (~ok).nonzero().flatten().tolist() == [5]
    assert [r.points[:, 0].tolist() for r in evaluator.requests] == [[*range(16)], [*range(8)], [4, 5]]
