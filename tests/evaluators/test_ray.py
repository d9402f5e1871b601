"""Evaluation by actors of Ray, on a cluster of two nodes."""

import copy
import gc
import logging
import pickle
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.evaluators import Local, Ray
from bondgrad.evaluators._ray import RayWorker
from tests.evaluators.test_executor import GY, X, ask, eventually, gradient_of, kill_process, once, sine
from tests.helpers import gradient

pytest.importorskip("ray")
SPREAD = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
STORE = 80 * 2**20  # bytes of objects on each node: the least that Ray takes is 75 MB


@pytest.fixture(scope="module")
def cluster():
    """A cluster whose first node has two CPUs."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def live_actors():
    """The number of actors that are not dead."""
    from ray._private.state import actors

    return sum(actor["State"] != "DEAD" for actor in actors().values())


@pytest.fixture(scope="module")
def shared(cluster):
    """Actors that several tests use."""
    with Ray(2, max_rows=1, spares=0) as evaluator:
        yield evaluator


def test_gradients_are_those_of_local(shared):
    g, layer = gradient_of(shared, sine())
    expected, _ = gradient_of(Local(max_rows=1), sine())
    assert torch.equal(g, expected)
    assert layer.stats.evaluations == 4 + 4 * 6
    assert {worker.worker for worker in layer.stats.workers} <= {0, 1}


def test_rows_that_raise_are_asked_again_and_told(shared):
    points = X.clone()
    points[2] = 3.0
    with pytest.warns(UserWarning, match=r"1 row was asked again, and 1 remained without.*overvoltage"):
        outcome = ask(shared, sine(2.0), points)
    assert outcome.ok.tolist() == [True, True, False, True]
    assert torch.equal(outcome.y[:2], X[:2].sin())


def test_a_mistake_is_raised_at_once(shared):
    def box(x: torch.Tensor):
        return x.no_such_method()

    with pytest.raises(BoxError, match=r"raised AttributeError.*no_such_method") as raised:
        ask(shared, box)
    assert raised.value.__cause__.kind == "AttributeError"


def test_more_layers_than_an_actor_keeps_boxes_lose_no_rows(shared):
    layers = [BlackBox(sine(10.0 + i), 3, evaluator=shared) for i in range(6)]
    for _ in range(2):
        assert all(torch.equal(layer(X), X.sin()) for layer in layers)
    assert all(layer.stats.failures == 0 and not layer.stats.errors for layer in layers)


def test_an_actor_that_dies_is_replaced(shared, tmp_path):
    with pytest.warns(UserWarning, match=r"worker \d ended while it evaluated 2 rows: ActorDiedError"):
        outcome = ask(shared, once(tmp_path / "once", kill_process))
    assert torch.equal(outcome.y, X.sin())
    assert outcome.ok is None


def test_a_factory_is_given_numbers_and_an_actor_that_hangs_is_replaced(cluster, tmp_path):
    marker, before = tmp_path / "once", live_actors()

    def factory(number):
        def box(x: torch.Tensor):
            if number == 1 and not marker.exists():
                marker.touch()
                while True:
                    pass
            return torch.sin(x) + 100 * number

        return box

    with Ray(2, factory, max_rows=1, timeout=1.0) as evaluator:
        assert evaluator.spares == 0
        layer = BlackBox(None, 3, evaluator=evaluator)
        with pytest.warns(UserWarning, match=r"worker 1 did not answer 1 row within"):
            eventually(lambda: torch.isfinite(layer(torch.zeros(8, 3))).all() and marker.exists())
        eventually(lambda: 100.0 in layer(torch.zeros(8, 3)))  # worker 1 is back
    eventually(lambda: live_actors() == before)


def test_a_factory_that_fails_is_told_when_the_layer_is_made(cluster):
    def factory():
        raise ValueError("no licence")

    with pytest.raises(BoxError, match="could not make its box: ValueError: no licence"):
        BlackBox(None, 3, evaluator=Ray(1, factory, spares=0))


def test_training_goes_on_when_a_node_leaves(cluster, tmp_path):
    node = cluster.add_node(num_cpus=2, object_store_memory=STORE)

    def factory():
        import ray

        (tmp_path / ray.get_runtime_context().get_node_id()).touch()

        def box(x: torch.Tensor):
            return torch.sin(x)

        return box

    with Ray(2, factory, resources=SPREAD, max_rows=1) as evaluator:
        box = BlackBox(None, 3, evaluator=evaluator, policy="bond", seed=0)
        layer, data = torch.nn.Linear(3, 3), torch.randn(16, 3)
        optimizer, losses = torch.optim.Adam(layer.parameters(), 0.1), []
        for step in range(30):
            if step == 3:
                eventually(lambda: len(list(tmp_path.iterdir())) == 2)
                leaving = threading.Thread(target=cluster.remove_node, args=(node,))
                leaving.start()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # rows were asked again
                loss = (box(layer(data)) - 0.5).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        leaving.join()
        assert losses[-1] < losses[0] / 3
        assert box.stats.failures == 0
        expected, _ = gradient_of(Local(max_rows=1), sine())
        assert torch.equal(gradient(BlackBox(None, 3, evaluator=evaluator, policy="bond", seed=0), X, GY), expected)


def test_a_node_that_joins_gets_actors(cluster, monkeypatch):
    before, made = live_actors(), RayWorker._living_actor

    def last_for_worker_0(worker):  # there is no room left for its actor
        if worker.number == 0:
            eventually(lambda: live_actors() >= before + 2)
        return made(worker)

    monkeypatch.setattr(RayWorker, "_living_actor", last_for_worker_0)
    with Ray(3, sine, resources={"num_cpus": 1}, max_rows=1) as evaluator:
        layer = BlackBox(None, 3, evaluator=evaluator, policy="bond", seed=0)
        expected, _ = gradient_of(Local(max_rows=1), sine())
        assert torch.equal(gradient(layer, X, GY), expected)
        assert 0 not in {worker.worker for worker in layer.stats.workers}
        node = cluster.add_node(num_cpus=1, object_store_memory=STORE)
        eventually(lambda: layer(X) is not None and len(layer.stats.workers) == 3)
        assert layer.stats.failures == 0
    cluster.remove_node(node)


def test_an_evaluator_that_is_forgotten_leaves_no_actors(cluster):
    before = live_actors()
    evaluator = Ray(1, spares=0)
    assert torch.equal(ask(evaluator, sine()).y, X.sin())
    assert live_actors() == before + 1
    evaluator, reference = None, weakref.ref(evaluator)
    gc.collect()
    assert reference() is None
    eventually(lambda: live_actors() == before)


def test_copies_share_it_and_a_saved_one_is_made_anew():
    layer = BlackBox(torch.sin, 3, evaluator=Ray(3, timeout=2.0, resources={"num_cpus": 0.5}))
    assert copy.deepcopy(layer).evaluator is layer.evaluator
    loaded = pickle.loads(pickle.dumps(layer)).evaluator
    assert loaded is not layer.evaluator
    assert loaded.settings() == layer.evaluator.settings()
    assert repr(loaded) == "Ray(3, max_rows=None, timeout=2.0)"


def test_arguments():
    with pytest.raises(ValueError, match=r"resources must be options of an actor of Ray, got \{'num_gpu': 1\}"):
        Ray(1, resources={"num_gpu": 1})
    assert [Ray(1).spares, Ray(1, resources={"num_gpus": 1}).spares, Ray(1, lambda n: n).spares] == [1, 0, 0]


def test_ray_is_started_and_ended_if_need_be():
    program = """
import psutil, ray, torch
from bondgrad import BlackBox, BoxError
from bondgrad.evaluators import Ray

first, second = (BlackBox(torch.sin, 3, evaluator=Ray(1, spares=0)) for _ in range(2))
x = torch.randn(2, 3)
assert not ray.is_initialized()
assert torch.equal(first(x), x.sin()) and torch.equal(second(x), x.sin())
first.evaluator.close()
assert torch.equal(second(x), x.sin())
ray.shutdown()
try:
    second(x)
except BoxError as error:
    assert "call close() of the evaluator before" in str(error)
else:
    raise AssertionError
second.evaluator.close()
assert not ray.is_initialized()
psutil.wait_procs(psutil.Process().children(recursive=True), timeout=30)
assert not psutil.Process().children()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
