"""Executors whose tasks are no ordinary futures: jobs of submitit, and futures that cannot be cancelled."""

import contextlib
import os
import threading
import time
from concurrent.futures import Future

import pytest
import torch

from bondgrad import BlackBox
from bondgrad.evaluators import Executor
from tests.evaluators.test_executor import X, eventually, sine


def test_jobs_of_submitit(tmp_path):
    submitit = pytest.importorskip("submitit")
    layer = BlackBox(sine(), 3, evaluator=Executor(submitit.LocalExecutor(tmp_path), n=1))
    assert torch.equal(layer(X), X.sin())
    assert layer.stats.evaluations == 4


@pytest.mark.parametrize("late", [False, True])
def test_closing_ends_jobs(tmp_path, late):
    submitit = pytest.importorskip("submitit")
    psutil = pytest.importorskip("psutil")

    def box(x: torch.Tensor):
        (tmp_path / "begun").write_text(str(os.getpid()))
        time.sleep(600)

    evaluator = Executor(submitit.LocalExecutor(tmp_path), n=1, timeout=10.0 if late else None, retries=0)
    layer = BlackBox(box, 3, evaluator=evaluator)
    threading.Thread(target=lambda: suppressed(lambda: layer(X[:1])), daemon=True).start()
    eventually((tmp_path / "begun").exists)
    if late:
        eventually(lambda: evaluator.abandoned == 1)
    evaluator.close()
    eventually(lambda: not psutil.pid_exists(int((tmp_path / "begun").read_text() or 0)))


def suppressed(work):
    with contextlib.suppress(Exception):
        work()


def test_futures_that_cannot_be_cancelled():
    class Uncancellable(Future):
        """As that of Parsl."""

        def cancel(self):
            raise NotImplementedError

    class Plain:
        submitted = threading.Event()

        def submit(self, fn, *arguments):
            self.submitted.set()
            return Uncancellable()

    evaluator = Executor(Plain(), sine, n=1)
    threading.Thread(target=lambda: suppressed(evaluator.describe), daemon=True).start()
    assert Plain.submitted.wait(60)
    evaluator.close()
