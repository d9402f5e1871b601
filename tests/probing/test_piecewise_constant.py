"""Piecewise constant boxes are called so; coarse arithmetic, kinks and jumps are not."""

import pytest
import torch
from torch import nn

from bondgrad import probe
from tests.probing.test_probe import rounded_to_tf32

D = 6


def typical(seed=0):
    return 0.3 * torch.randn(200, D, generator=torch.Generator().manual_seed(seed))


def weights(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 2


def trees(kind):
    pytest.importorskip("sklearn")
    from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
    from sklearn.tree import DecisionTreeRegressor

    x = 0.3 * torch.randn(1000, D, generator=torch.Generator().manual_seed(1))
    y = torch.tanh(x @ weights(D, 3))
    if kind == "boosted":
        model = GradientBoostingRegressor(random_state=0).fit(x.numpy(), y[:, 0].numpy())
        return lambda x: model.predict(x)[:, None]
    made = {"tree": DecisionTreeRegressor(max_depth=4, random_state=0), "forest": RandomForestRegressor(random_state=0)}
    return made[kind].fit(x.numpy(), y.numpy()).predict


@pytest.mark.parametrize("kind", ["tree", "forest", "boosted"])
@pytest.mark.parametrize("seed", range(3))
def test_trees(kind, seed):
    report = probe(trees(kind), typical(seed), seed=seed)
    assert "piecewise constant, " in report.verdict
    assert not any(name in report.verdict for name in ("TF32", "float16", "with jumps"))
    assert report.rounding.floor == 0
    assert "structure" not in report.arguments
    assert any("the slope over a step that reaches across them" in text for text in report.warnings)


def test_decisions_of_a_network():
    first, second = weights(D, 200), weights(200, 3)
    assert "piecewise constant" in probe(lambda x: (3 * x @ first > 0).float() @ second, typical()).verdict


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.relu(x - 0.3),  # flat over more than half of the range
        lambda x: torch.sign(x) + x,
        lambda x: torch.tanh(x @ weights(D, 3)).bfloat16().float(),
        lambda x: x.bfloat16() @ weights(D, 3).bfloat16(),
        lambda x: rounded_to_tf32(torch.tanh(rounded_to_tf32(x) @ weights(D, 30))) @ weights(30, 3),
        lambda x: 1000 + 0.01 * x,
        nn.Sequential(nn.Linear(D, 30), nn.ReLU(), nn.Linear(30, 3)),
    ],
    ids=["relu", "jumps", "bfloat16 out", "bfloat16", "TF32", "offset", "network"],
)
@pytest.mark.parametrize("seed", range(3))
def test_others_are_not(fn, seed):
    report = probe(fn, typical(seed), seed=seed)
    assert not report.steps.constant
    assert "piecewise constant" not in report.verdict
