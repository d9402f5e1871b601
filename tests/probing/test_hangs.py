"""An evaluator that ends calls which hang: they cost little of the time of a probe, which says so."""

import pytest
import torch

from bondgrad import BoxError, probe
from bondgrad.evaluators import Answer, Call, Evaluator
from tests.probing.test_probe import rows


class EndsCalls(Evaluator):
    """Some calls hang, and are ended after the timeouts of their rows, which two workers share."""

    n = 2

    def __init__(self, clock, timeout, every):
        super().__init__()
        self.clock, self.timeout, self.every, self.requests = clock, timeout, every, []

    def evaluate(self, request):
        rows = len(request.points)
        self.requests.append(rows)
        if len(self.requests) % self.every:
            self.clock.sleep(1e-3)
            return Answer(torch.sin(request.points))
        seconds = self.timeout * rows / self.n
        self.clock.sleep(seconds)
        error = BoxError("too late")
        error.__cause__ = TimeoutError()
        return Answer(torch.zeros(rows, 4), torch.zeros(rows).bool(), (Call(0, rows, 0, 0.0, seconds, error),))


@pytest.mark.parametrize(("timeout", "most"), [(0.5, 2), (0.1, 10), (20.0, 2)])
def test_calls_that_an_evaluator_ends_cost_little_of_the_time(clock, timeout, most):
    evaluator = EndsCalls(clock, timeout, every=250)
    report = probe(torch.sin, rows(), seconds=10, evaluator=evaluator)
    assert max(evaluator.requests) == most
    assert clock.now < 10 + max(1, timeout)
    assert "hangs now and then" in report.verdict
    assert f"did not answer within the timeout of {timeout:g} s a row; ending them took" in report.timeouts
    assert any("give the evaluator max_rows=1" in text for text in report.warnings)
    assert all("do not reach, since calls that hang took" in text for text in report.left_out)
    assert (len(report.left_out) > 0) == (timeout > 0.1)


def test_an_evaluator_that_ends_no_call(clock):
    report = probe(torch.sin, rows(), evaluator=EndsCalls(clock, 1.0, every=10**9), budget=2000)
    assert report.timeouts == ""
    assert "hangs" not in report.verdict
    assert not any("hang" in text for text in report.left_out)
