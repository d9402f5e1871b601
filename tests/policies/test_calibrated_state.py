"""The state of policies that measure: saved, loaded, and left alone by evaluation."""

import copy
import io

import pytest
import torch

from bondgrad import BlackBox, Simultaneous
from tests.helpers import close, gradient, same_state
from tests.policies.test_calibrated import D, exact_gradient, layer_of, problems, rough, trained, waves

SETTINGS = {
    "calibrated": {},
    "forward": {"estimator": "forward"},
    "simultaneous": {"estimator": Simultaneous(2)},
    "auto": {"policy": "bond", "noise": "auto"},
    "both": {"noise": "auto"},
}
settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


@settings
@pytest.mark.parametrize("n", [0, 1, 20])
def test_a_resumed_run_goes_on_bit_for_bit(settings, n):
    layer, fresh = layer_of(rough, **settings), layer_of(rough, **settings)
    trained(layer, n)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.policy_state.random.load(BlackBox(waves, D, seed=9).policy_state.random.state())
    fresh.load_state_dict(torch.load(file))
    for x, gy in problems(40, seed=2):
        assert torch.equal(gradient(layer, x, gy), gradient(fresh, x, gy))
    assert same_state(layer.state_dict(), fresh.state_dict())


@settings
@pytest.mark.parametrize("n", [0, 1, 10])
def test_evaluation_leaves_no_trace(settings, n):
    layer = trained(layer_of(waves, **settings), n).eval()
    before = copy.deepcopy(layer.state_dict())
    (x, gy), *_ = problems(1, seed=2)
    g = gradient(layer, x, gy)
    assert torch.equal(g, gradient(layer, x, gy))
    assert same_state(layer.state_dict(), before, but=["requests"])
    if "simultaneous" not in str(layer.estimator).lower():
        assert close(g, exact_gradient(waves, x, gy), 1e-2)


def test_an_older_state_can_be_loaded():
    layer, older = layer_of(waves, policy="bond"), layer_of(waves, policy="bond").state_dict()
    del older["policy_state._extra_state"]["schedule"]
    layer.load_state_dict(older)
    assert layer.policy_state.schedule.trials == 0
