"""Evaluation by servers of UM-Bridge, in other processes."""

import copy
import math
import pickle
import socket
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.evaluators import Driver, Local, UMBridge
from tests.evaluators.test_executor import eventually
from tests.helpers import gradient

umbridge = pytest.importorskip("umbridge")

SERVER = """
import math, pathlib, sys, time, umbridge

class Forward(umbridge.Model):
    def get_input_sizes(self, config):
        return [1, 2]
    def get_output_sizes(self, config):
        return [2, 1]
    def __call__(self, parameters, config):
        (a,), (b, c) = parameters
        if b > 5:
            raise ValueError("overvoltage")
        while c > 5:
            time.sleep(1)
        pathlib.Path(config.get("seen", "."), sys.argv[1]).touch() if "seen" in config else None
        return [[math.sin(a) * b, c * c], [config.get("scale", 1.0) * a]]
    def supports_evaluate(self):
        return True

umbridge.serve_models([Forward("forward")], int(sys.argv[1]))
"""
X, GY = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(1, 2, 12).view(4, 3)


def forward(x: np.ndarray):
    """What the servers compute."""
    return np.array([[math.sin(a) * b, c * c, a] for a, b, c in x.tolist()])


Y = torch.from_numpy(forward(X.numpy())).float()


class Server:
    def __init__(self):
        with socket.socket() as free:
            free.bind(("", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://localhost:{self.port}"
        self.start()

    def start(self):
        command = [sys.executable, "-c", SERVER, str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(self.answers)

    def answers(self):
        try:
            return umbridge.supported_models(self.url) == ["forward"]
        except OSError:
            return False

    def stop(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def servers():
    servers = [Server(), Server()]
    yield servers
    for server in servers:
        server.stop()


def layer_of(evaluator, fn=None):
    return BlackBox(fn, 3, evaluator=evaluator, policy="bond", seed=0)


def ask(evaluator, points):
    layer = BlackBox(None, 3, evaluator=evaluator)
    return Driver(evaluator).ask(layer.function, points)


@pytest.mark.parametrize("parallel", [1, 4])
def test_gradients_are_those_of_local(servers, parallel):
    layer = layer_of(UMBridge(servers[0].url, "forward", parallel=parallel))
    assert torch.equal(gradient(layer, X, GY), gradient(layer_of(Local(max_rows=1), forward), X, GY))
    assert layer.function.name == "forward"
    assert layer.stats.evaluations == layer.stats.calls == 4 + 4 * 6


def test_several_servers_take_turns(servers, tmp_path):
    urls, config = [server.url for server in servers], {"scale": 3.0, "seen": str(tmp_path)}
    layer = layer_of(UMBridge(urls, "forward", parallel=4, config=config))
    eventually(lambda: torch.equal(layer(X)[:, 2], 3 * X[:, 0]) and len(list(tmp_path.iterdir())) == 2)
    assert {int(path.name) for path in tmp_path.iterdir()} == {server.port for server in servers}


def test_a_row_that_raises_on_the_server_is_left_out(servers):
    points = X.clone()
    points[2, 1] = 6.0
    with pytest.warns(UserWarning, match=r"1 row was asked again, and 1 remained without an output.* see its log"):
        outcome = ask(UMBridge(servers[0].url, "forward", parallel=2), points)
    assert outcome.ok.tolist() == [True, True, False, True]


def test_a_server_that_goes_down_is_waited_for(servers):
    server = Server()
    try:
        evaluator = UMBridge(server.url, "forward", retries=3)
        layer = BlackBox(None, 3, evaluator=evaluator)
        assert torch.equal(layer(X), Y)
        server.stop()
        with pytest.raises(BoxError, match=r"raised ConnectionError") as raised:
            layer(X)
        assert "None of 4 rows got an output" in str(raised.value.__notes__)
        server.start()
        assert torch.equal(layer(X), Y)
        assert set(layer.stats.errors) == {"ConnectionError"}
    finally:
        server.stop()


def test_other_servers_do_the_work_of_one_that_is_down(servers):
    server = Server()
    evaluator = UMBridge([servers[0].url, server.url], "forward", parallel=2)
    try:
        assert ask(evaluator, X).ok is None
    finally:
        server.stop()
    layer = BlackBox(None, 3, evaluator=evaluator)
    for _ in range(5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rows were asked again
            assert torch.equal(layer(X), Y)


def test_requests_that_hang_are_an_error():
    server = Server()
    try:
        evaluator = UMBridge(server.url, "forward", timeout=0.2, retries=None)
        with pytest.raises(BoxError, match=r"2 threads hang in the box.*Restart the server"):
            ask(evaluator, X + torch.tensor([0.0, 0.0, 7.0]))
    finally:
        server.stop()
    eventually(lambda: evaluator.abandoned == 0)


def test_another_number_of_inputs_is_told_at_once(servers):
    layer = BlackBox(None, 4, evaluator=UMBridge(servers[0].url, "forward", retries=None))
    message = rf"forward at {servers[0].url} takes 3 inputs \(vectors of \[1, 2\]\), got 4: .*in_features=3"
    with pytest.raises(BoxError, match=message):
        layer(torch.zeros(2, 4))


def test_no_server_and_no_such_model_are_told_when_the_layer_is_made(servers):
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    with pytest.raises(BoxError, match=r"a worker of UMBridge could not make its box.*Start the server"):
        BlackBox(None, 3, evaluator=UMBridge(f"http://localhost:{port}", "forward"))
    with pytest.raises(BoxError, match=r"Model backward not supported.*correct url= and model="):
        BlackBox(None, 3, evaluator=UMBridge(servers[0].url, "backward"))


def test_copies_share_it_and_a_saved_one_is_made_anew(servers):
    urls = [server.url for server in servers]
    layer = layer_of(UMBridge(urls, "forward", parallel=2, config={"scale": 2.0}, timeout=9.0))
    assert copy.deepcopy(layer).evaluator is layer.evaluator
    loaded = pickle.loads(pickle.dumps(layer))
    assert loaded.evaluator is not layer.evaluator
    assert loaded.evaluator.settings() == layer.evaluator.settings()
    assert torch.equal(loaded(X), layer(X))
    assert repr(layer.evaluator) == f"UMBridge({urls}, 'forward', parallel=2, timeout=9.0)"


@pytest.mark.parametrize("url", [[], 4242, [4242]])
def test_addresses_are_checked(url):
    with pytest.raises(ValueError, match="url must be an address, such as 'http://localhost:4242', or a list of some"):
        UMBridge(url, "forward")
