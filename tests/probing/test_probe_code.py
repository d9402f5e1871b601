"""The code that a probe recommends: it runs, trains, and costs what was predicted."""

import pytest
import torch
from torch import nn

from bondgrad import probe
from bondgrad.testing.boxes import Sparse
from tests.helpers import close, gradient, noisy
from tests.patterns import blocks
from tests.probing.test_probe import D, network, rows, simulator


def pasted(report, fn, **more):
    """The box that the recommended code makes."""
    names = {report.name: fn}
    lines = "".join(f"    {name}={value!r},\n" for name, value in more.items())
    exec(report.code.removesuffix(")") + lines + ")", names)  # noqa: S102
    return names["box"]


@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
@pytest.mark.parametrize("kind", ["smooth", "noisy", "decimals", "blocks"])
def test_predicted_evaluations_are_those_of_training(kind, estimator):
    asked = 0
    inside = {
        "smooth": torch.sin,
        "noisy": noisy(lambda x: torch.sin(x).cumsum(1), 1e-2),
        "decimals": lambda x: (100 * torch.sin(x).cumsum(1)).round() / 100,
        "blocks": Sparse(blocks(2, 2, 2)),
    }[kind]

    def fn(x):
        nonlocal asked
        asked += len(x)
        return inside(x)

    x = rows()
    report = probe(fn, x)
    box = pasted(report, fn, estimator=estimator)
    asked = 0
    for _ in range(300):
        box(x[torch.randint(200, (64,))].requires_grad_()).sum().backward()
    assert asked == pytest.approx(300 * report.cost(64, 300)[estimator].evaluations, rel=0.03)


@pytest.mark.parametrize("kind", ["smooth", "noisy", "decimals", "bfloat16"])
def test_the_recommended_code_has_good_gradients(kind):
    def fn(x):
        return torch.sin(x).cumsum(1)

    coarse = {
        "smooth": fn,
        "noisy": noisy(fn, 1e-3),
        "decimals": lambda x: (100 * fn(x)).round() / 100,
        "bfloat16": lambda x: fn(x).bfloat16().float(),
    }[kind]
    x = rows()
    box = pasted(probe(coarse, x), coarse)
    gy = torch.randn(64, D)
    for _ in range(3):  # the policy has seen the box a few times
        found = gradient(box, x[:64], gy)
    assert close(found, gradient(fn, x[:64], gy), 0.1)


@pytest.mark.parametrize("kind", ["smooth", "noisy", "single", "blocks", "module"])
def test_the_recommended_code_trains(kind):
    def single(x):
        assert len(x) == 1
        return torch.sin(x)

    fn = {
        "smooth": simulator,
        "noisy": noisy(torch.sin, 1e-3),
        "single": single,
        "blocks": Sparse(blocks(2, 2, 2)),
        "module": network(nn.Dropout(0.2)),
    }[kind]
    report = probe(fn, rows(), limits=(-3, 3))
    read_in = nn.Linear(2, D)
    model = nn.Sequential(read_in, pasted(report, fn), nn.Linear(report.out_features, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x = torch.randn(64, 2)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(model(x), x[:, :1].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert read_in.weight.grad.abs().max() > 0
