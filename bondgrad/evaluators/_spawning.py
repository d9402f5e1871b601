"""New Python processes that do not import the program which starts them."""

import functools
import threading
from multiprocessing import spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

_this_thread = threading.local()


class WorkerProcess(SpawnProcess):
    """A process that is spawned without the main module, which multiprocessing would run again in it.

    Workers need none of it, since functions of the main module are sent by value. So scripts need no
    ``if __name__ == "__main__":``, and programs that come from a notebook or from standard input work.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: ANN401, N802 - the name is multiprocessing's
        _leave_out_main()
        _this_thread.starts_worker = True
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            _this_thread.starts_worker = False


class WorkerContext(SpawnContext):
    """As multiprocessing's context "spawn", with `WorkerProcess`."""

    Process = WorkerProcess


@functools.cache
def _leave_out_main() -> None:
    """Let processes that are started as `WorkerProcess` be told nothing of the main module; others are, as before."""
    original = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        if getattr(_this_thread, "starts_worker", False):
            data = {key: value for key, value in data.items() if not key.startswith("init_main")}
        return data

    spawn.get_preparation_data = get_preparation_data


CONTEXT = WorkerContext()
