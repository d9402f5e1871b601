"""California Housing trained through boxes that are elsewhere, each beside the same training in this process.

    python benchmarks/evaluator_housing.py

The box is a frozen 5-500-5 network in numpy: behind a UM-Bridge server in another process, on a Dask cluster of two
workers, and on a Ray cluster of two nodes, of which one is removed in the middle of training. Batch 32, central
differences with calibrated steps, one row in a call. Losses must be the same to the last bit.
"""

import contextlib
import multiprocessing
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from evaluator_kinds import dask
from record import save
from torch import nn

from bondgrad import BlackBox
from bondgrad.data import california_housing
from bondgrad.evaluators import Evaluator, Local, Ray, UMBridge

STEPS, BATCH = 60, 32


class Network:
    """A frozen network 5-500-5."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.first, self.second = random.normal(size=(5, 500)), random.normal(size=(500, 5)) / 500**0.5

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Rows [N, 5] to rows [N, 5], in double precision."""
        return np.stack([np.tanh(row @ self.first) @ self.second for row in x.astype(np.float64)])


def serve(port: int) -> None:
    """A UM-Bridge server with the network."""
    import umbridge

    class Model(umbridge.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("network")
            self.network = Network()

        def get_input_sizes(self, config: Any) -> list[int]:
            return [5]

        def get_output_sizes(self, config: Any) -> list[int]:
            return [5]

        def supports_evaluate(self) -> bool:
            return True

        def __call__(self, parameters: list[list[float]], config: Any) -> list[list[float]]:
            return self.network(np.array(parameters)).tolist()

    umbridge.serve_models([Model()], port)


@contextlib.contextmanager
def umbridge_server() -> Iterator[Evaluator]:
    """An evaluator of a server in another process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    server.start()
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        time.sleep(0.1)
    try:
        with UMBridge(f"http://127.0.0.1:{port}", "network", parallel=2) as evaluator:
            yield evaluator
    finally:
        server.terminate()
        server.join()


def train(fn: Any, evaluator: Evaluator, midway: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The losses of all steps, and what they took."""
    torch.manual_seed(0)
    data = california_housing(0)
    x, y = data.x_train[: STEPS * BATCH], data.y_train[: STEPS * BATCH]
    layer = BlackBox(fn, 5, evaluator=evaluator, seed=0)
    model = nn.Sequential(
        nn.Linear(8, 100), nn.Tanh(), nn.Linear(100, 5), layer, nn.Linear(5, 100), nn.Tanh(), nn.Linear(100, 1)
    )
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-3), []
    start = time.perf_counter()
    for step, (rows, target) in enumerate(zip(x.split(BATCH), y.split(BATCH), strict=True)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(rows), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == STEPS // 2:
            midway()
    seconds, stats = time.perf_counter() - start, layer.stats
    return {
        "losses": losses,
        "seconds": seconds,
        "evaluations": stats.evaluations,
        "asked again": stats.retried,
        "failures": stats.failures,
    }


def ray_with_a_node_removed() -> dict[str, Any]:
    """Train on two nodes, of which one is removed in the middle."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 10**8})
    second = cluster.add_node(num_cpus=1, object_store_memory=10**8)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        with Ray(2, Network, max_rows=1, resources={"num_cpus": 1}) as evaluator, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that rows were asked again
            return train(None, evaluator, lambda: cluster.remove_node(second, allow_graceful=False))
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    """Train in all places, compare, save."""
    torch.set_num_threads(1)
    found = {"Local": train(Network(), Local(max_rows=1))}
    with umbridge_server() as evaluator:
        found["UM-Bridge"] = train(None, evaluator)
    with dask(2, max_rows=1, factory=Network) as evaluator:
        found["Dask, two workers"] = train(None, evaluator)
    found["Ray, two nodes, one removed"] = ray_with_a_node_removed()
    expected = found["Local"]["losses"]
    numbers = {
        name: {
            "steps": STEPS,
            "first loss": run["losses"][0],
            "last loss": run["losses"][-1],
            "steps with another loss": sum(a != b for a, b in zip(run["losses"], expected, strict=True)),
        }
        | {key: value for key, value in run.items() if key != "losses"}
        for name, run in found.items()
    }
    for name, row in numbers.items():
        print(name, row)
    save("evaluator_housing", numbers)


if __name__ == "__main__":
    main()
