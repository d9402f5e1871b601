"""Parts of a layer that is in use can be exchanged, and parts of one's own are treated as those of the library."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn

from bondgrad import BlackBox, Central, Forward, Simultaneous
from bondgrad.evaluators import Local
from bondgrad.policies import Bond, Calibrated, Fixed, Policy, Steps
from bondgrad.structure import Blocks, Dense, Pattern, Sequence
from bondgrad.testing.boxes import Sparse, Waves
from tests.evaluators.test_own_evaluators import Recording
from tests.helpers import close, gradient, on_each_device, same_state

# ---- exchanging parts

POLICIES = {"fixed": lambda: Fixed(1e-3), "calibrated": Calibrated, "bond": Bond, "by name": lambda: "bond"}


def train(layer, exact, steps=3, tolerance=1e-2, device="cpu"):
    """Some steps, each with a gradient that is right."""
    d, d_out = exact.in_features, exact.out_features
    for _ in range(steps):
        x, gy = torch.randn(32, d, device=device), torch.randn(32, d_out, device=device)
        g = gradient(layer, x, gy)
    assert close(g, exact.vjp(x, gy), tolerance)


@on_each_device
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(POLICIES, 2)))
def test_another_policy_in_the_middle_of_training(before, after, device):
    exact = Waves(3, 5)
    layer = BlackBox(exact, 3, policy=POLICIES[before](), seed=0).to(device)
    train(layer, exact, device=device)
    layer.policy = POLICIES[after]()
    assert type(layer.policy) is type(BlackBox(exact, 3, policy=POLICIES[after]()).policy)
    assert all(buffer.device.type == device for buffer in layer.policy_state.buffers())
    train(layer, exact, device=device)
    loads_into(layer, BlackBox(exact, 3, policy=POLICIES[after](), seed=1).to(device), device)


def loads_into(layer, other, device="cpu"):
    """The state of a layer goes to another that was made with its parts, which goes on in the same way."""
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(2):
        x, gy = torch.randn(32, layer.in_features, device=device), torch.randn(32, layer.out_features, device=device)
        assert torch.equal(gradient(layer, x, gy), gradient(other, x, gy))
    assert same_state(layer.state_dict(), other.state_dict())


def test_another_policy_is_what_it_would_be_from_the_start():
    exact = Waves(3, 5)
    layer, other = (BlackBox(exact, 3, policy=policy, seed=0) for policy in (Fixed(1e-3), "bond"))
    layer.policy = "bond"
    x, gy = torch.randn(8, 3), torch.randn(8, 5)
    assert torch.equal(gradient(layer, x, gy), gradient(other, x, gy))


@pytest.mark.parametrize("policy", ["calibrated", "bond"])
def test_another_estimator_in_the_middle_of_training(policy):
    exact = Waves(3, 5)
    layer = BlackBox(exact, 3, policy=policy, seed=0)
    for estimator in ("central", "forward", Simultaneous(256), "simultaneous", Forward(), "central"):
        layer.estimator = estimator
        random = isinstance(layer.estimator, Simultaneous)
        train(layer, exact, tolerance=1e-2 if not random else 0.5 if layer.estimator.n > 1 else 10)
    loads_into(layer, BlackBox(exact, 3, policy=policy, seed=1))


def test_steps_measured_for_other_differences_are_measured_anew():
    layer = BlackBox(Waves(3, 5), 3, seed=0)
    train(layer, Waves(3, 5))
    layer.estimator = "forward"
    assert layer.trial_due
    assert torch.equal(layer.policy_state.step, BlackBox(torch.sin, 3).policy_state.step)
    layer.policy = Fixed(1e-3)
    train(layer, Waves(3, 5))
    layer.estimator = "central"
    assert not layer.trial_due


def test_another_structure_in_the_middle_of_training():
    pattern = torch.eye(6, dtype=torch.bool) | torch.eye(6, dtype=torch.bool).roll(1, 1)
    exact = Sparse(pattern)
    layer = BlackBox(exact, 6, policy=Fixed(1e-3), seed=0)
    costs = {}
    for structure in ("dense", pattern, "auto", Pattern(pattern), pattern.numpy(), "auto", None):
        layer.structure = structure
        train(layer, exact, 1)  # in which "auto" has a look
        before = layer.stats.evaluations
        train(layer, exact, 1)
        costs[str(structure)] = (layer.stats.evaluations - before) // 32 - 1
    assert costs["dense"] == costs["None"] == 12
    assert costs["auto"] == costs[str(pattern)] == 4
    assert isinstance(layer.structure, Dense)
    layer.structure = "auto"
    train(layer, exact)
    loads_into(layer, BlackBox(exact, 6, policy=Fixed(1e-3), structure="auto", seed=1))


def test_from_rows_to_sequences_and_back():
    def running_mean(x):  # of rows, or of sequences, over their last dimension but one
        return torch.sin(x) if x.ndim == 2 else torch.sin(x) + x.cumsum(1)

    layer = BlackBox(running_mean, 2, policy=Fixed(1e-3), seed=0)
    rows, sequences = torch.randn(4, 2), torch.randn(4, 5, 2)
    for horizon in (None, "auto", None):
        assert close(gradient(layer, rows, torch.ones(4, 2)), rows.cos(), 1e-2)
        layer.structure = Sequence(horizon)
        steps_behind = torch.arange(5, 0, -1.0)[:, None]
        assert close(gradient(layer, sequences, torch.ones(4, 5, 2)), sequences.cos() + steps_behind, 1e-2)
        layer.structure = "dense"


def test_another_evaluator_in_the_middle_of_training():
    exact = Waves(3, 5)
    layer, other = (BlackBox(exact, 3, seed=0) for _ in range(2))
    for evaluator in (Recording(), Local(max_rows=7), None, Recording()):
        layer.evaluator = evaluator
        x, gy = torch.randn(16, 3), torch.randn(16, 5)
        assert close(gradient(layer, x, gy), gradient(other, x, gy), 1e-5)  # chunks of other sizes round otherwise
    assert isinstance(other.evaluator, Local)


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("policy", "bonds", "policy must be one of 'bond', 'calibrated' or an instance of Policy, got 'bonds'"),
        ("policy", Fixed, "policy must be one of"),
        ("policy", None, "policy must be one of"),
        ("estimator", "centre", "estimator must be one of 'central', 'forward', 'simultaneous' or an instance"),
        ("estimator", Central, "estimator must be one of"),
        ("evaluator", "local", "evaluator must be an instance from bondgrad.evaluators, or None, got 'local'"),
        ("evaluator", Local, "evaluator must be an instance"),
        ("structure", "sparse", "structure must be 'dense', 'auto'"),
        ("structure", torch.ones(5, 4, dtype=torch.bool), "the pattern in structure must be"),
        ("structure", Blocks(2, 1), "does not fit a box with 3 inputs"),
    ],
)
def test_wrong_values_are_refused_as_in_the_constructor(name, wrong, said):
    layer = BlackBox(Waves(3, 5), 3, 5, seed=0)
    x, gy = torch.randn(8, 3), torch.randn(8, 5)
    gradient(layer, x, gy)
    twin = copy.deepcopy(layer)
    before = getattr(layer, name)
    with pytest.raises(ValueError, match=said):
        BlackBox(Waves(3, 5), 3, 5, **{name: wrong})
    with pytest.raises(ValueError, match=said):
        setattr(layer, name, wrong)
    assert getattr(layer, name) is before
    assert torch.equal(gradient(layer, x, gy), gradient(twin, x, gy))
    assert same_state(layer.state_dict(), twin.state_dict())


def test_the_seed_of_a_box_and_forward_differences():
    def fn(x, seed):
        return torch.sin(x)

    layer = BlackBox(fn, 3)
    with pytest.warns(UserWarning, match="fn takes a seed, but estimator='forward'") as caught:
        layer.estimator = "forward"
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="fn takes a seed, but estimator='forward'") as caught:
        BlackBox(fn, 3, estimator="forward")
    assert caught[0].filename == __file__


class ModulePolicy(nn.Module, Fixed):
    """A policy that is a module, too."""

    def __init__(self):
        nn.Module.__init__(self)
        Fixed.__init__(self, 1e-3)


class ModuleEstimator(nn.Module, Central):
    def __init__(self):
        nn.Module.__init__(self)
        Central.__init__(self)


def test_parts_that_are_modules():
    exact = Waves(3, 5)
    layer = BlackBox(exact, 3, policy=ModulePolicy(), estimator=ModuleEstimator(), seed=0)
    for policy, estimator in ((Fixed(1e-2), Central()), (ModulePolicy(), ModuleEstimator()), ("bond", "central")):
        layer.policy, layer.estimator = policy, estimator
        assert isinstance(policy, str) or layer.policy is policy
        assert isinstance(estimator, str) or layer.estimator is estimator
        train(layer, exact)


def test_an_attribute_that_cannot_be_set_says_so():
    with pytest.raises(AttributeError):
        BlackBox(torch.sin, 3).stats = None


# ---- policies of one's own


class Counter(Policy):
    """Counts steps, and remembers the size of the last gradient, and of the one before."""

    def __init__(self, *names):
        self.names = names or ("now", "before", "steps")

    def init(self, in_features):
        now, before, *rest = self.names
        return {now: torch.zeros(in_features), before: torch.zeros(in_features)} | {
            name: torch.zeros((), dtype=torch.float64) for name in rest
        }

    def steps(self, state, batch, n, noise):
        size = batch.x.new_full((batch.x.shape[1],), 1e-3)
        return Steps(size.expand(n, *batch.x.shape), batch.uniform(n), size, size)

    def summarize(self, state, seen):
        assert seen.x.shape == seen.g.shape
        return seen.g.abs().sum(0)

    def observe(self, state, summary, rows, differences):
        now, before, *rest = self.names
        return {now: summary / rows, before: state[now]} | {name: state[name] + 1 for name in rest}


TAKEN = ["random", "schedule", "ranks", "names", "device", "training", "forward", "_extra_state", "_buffers", "a.b", ""]


@pytest.mark.parametrize("name", TAKEN)
def test_names_of_a_policys_state_that_are_taken(name):
    said = f"a policy's state cannot be called {name!r}"
    with pytest.raises(ValueError, match=said):
        BlackBox(torch.sin, 3, policy=Counter("now", "before", name))
    layer = BlackBox(torch.sin, 3, policy="bond", seed=0)
    twin = copy.deepcopy(layer)
    with pytest.raises(ValueError, match=said):
        layer.policy = Counter(name, "before")
    assert isinstance(layer.policy, Bond)
    assert same_state(layer.state_dict(), twin.state_dict())
    gradient(layer, torch.randn(4, 3), torch.ones(4, 3))


def test_a_policys_state_must_be_tensors():
    policy = Counter()
    policy.init = lambda in_features: {"steps": 0}
    with pytest.raises(ValueError, match="a policy's state must be tensors"):
        BlackBox(torch.sin, 3, policy=policy)


def test_a_policy_that_fails_to_begin_changes_nothing():
    layer = BlackBox(torch.sin, 3, policy="bond", seed=0)
    policy = Counter()
    policy.init = lambda in_features: 1 / 0
    with pytest.raises(ZeroDivisionError):
        layer.policy = policy
    assert isinstance(layer.policy, Bond)
    gradient(layer, torch.randn(4, 3), torch.ones(4, 3))


@on_each_device
@pytest.mark.parametrize("before", [Fixed(1e-3), Bond()])
def test_the_state_of_a_policy_is_where_the_layer_is(before, device):
    layer = BlackBox(Waves(3, 5), 3, policy=before).to(device).half()
    layer.policy = Counter()
    state = layer.policy_state
    train(layer, Waves(3, 5), device=device)
    for name, dtype in (("now", torch.float32), ("before", torch.float32), ("steps", torch.float64)):
        assert state.get_buffer(name).device.type == device
        assert state.get_buffer(name).dtype == dtype
    layer.to("cpu").bfloat16()
    assert all(buffer.device.type == "cpu" and buffer.itemsize >= 4 for buffer in state.buffers())
    layer.policy = "bond"
    assert state.sums.device.type == "cpu"


def test_a_policy_assigned_on_the_meta_device():
    layer = BlackBox(torch.sin, 3, policy=Fixed(1e-3)).to("meta")
    layer.policy = Counter()
    assert layer.policy_state.now.is_meta
    layer.to_empty(device="cpu").load_state_dict(BlackBox(torch.sin, 3, policy=Counter()).state_dict())
    gradient(layer, torch.randn(4, 3), torch.ones(4, 3))
    assert layer.policy_state.steps == 1


@pytest.mark.parametrize("names", [("now", "before"), ("a", "b")])
def test_a_value_kept_under_another_name(names):
    layer = BlackBox(lambda x: x * 2, 1, policy=Counter(*names, "steps"))
    for size in (1.0, 2.0, 3.0):
        gradient(layer, torch.zeros(4, 1), torch.full((4, 1), size))
    now, before = (layer.policy_state.get_buffer(name) for name in names)
    assert torch.allclose(now, torch.tensor(6.0))
    assert torch.allclose(before, torch.tensor(4.0))
    assert layer.policy_state.steps == 3


# ---- names of before


def test_states_saved_with_former_names_are_taken():
    pattern = torch.eye(4, dtype=torch.bool)
    made = [nn.Sequential(nn.Linear(4, 4), BlackBox(Sparse(pattern), 4, structure="auto", seed=s)) for s in (0, 1)]
    for x in torch.randn(2, 16, 4):
        made[0](x).sum().backward()
    saved = made[0].state_dict()
    before = type(saved)((name.replace("tracker.", "findings."), value) for name, value in saved.items())
    assert "1.findings._extra_state" in before
    made[1].load_state_dict(before)
    assert same_state(made[1].state_dict(), saved)
    assert isinstance(made[1][1].structure, Pattern)
    assert "1.findings._extra_state" in before  # which is not ours to change


def test_the_state_of_a_policy_that_had_another_form_begins_anew():
    layers = [BlackBox(Waves(3, 5), 3, seed=seed) for seed in (0, 1)]
    for layer in layers:
        for _ in range(20):
            gradient(layer, torch.randn(16, 3), torch.randn(16, 5))
    assert all(layer.policy_state.schedule.trials > 3 for layer in layers)
    before = layers[0].state_dict()
    before["policy_state.sums"] = before["policy_state.sums"][:6]
    del before["policy_state.jumps"]
    layers[1].load_state_dict(before)
    assert layers[1].policy_state.schedule.trials == 0
    assert not layers[1].policy_state.step.any()
    assert layers[1].policy_state.random.seed == layers[0].policy_state.random.seed
    gradient(layers[1], torch.randn(16, 3), torch.randn(16, 5))
    assert layers[1].policy_state.schedule.trials == 1
    with pytest.raises(RuntimeError, match="key"):
        BlackBox(Waves(3, 5), 3, policy="bond").load_state_dict(layers[0].state_dict())


def test_vitals_are_called_health():
    layer = BlackBox(Waves(3, 5), 3)
    gradient(layer, torch.randn(16, 3), torch.randn(16, 5))
    stats = layer.stats
    with pytest.warns(DeprecationWarning, match=r"stats\.vitals is called stats\.health now"):
        assert stats.vitals is stats.health
    assert stats.health is not None
