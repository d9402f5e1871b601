"""The backward pass: from perturbations, through evaluations, to the gradient at the box's inputs."""

import contextlib
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bondgrad.calling import _arguments as arguments
from bondgrad.calling._memory import Snapshots
from bondgrad.errors import BoxError
from bondgrad.policies import Batch
from bondgrad.step._forward import Pass
from bondgrad.step._neighbourhood import Asking, moves
from bondgrad.step._trace import Step
from bondgrad.step._trials import Tries, half_width, learn, trial_due, tries_out
from bondgrad.structure.discovery._tracker import Found
from bondgrad.torch_support._device import is_capturing, look_is_free

if TYPE_CHECKING:
    from bondgrad.box import BlackBox


class Circumstances(NamedTuple):
    """Of a forward pass, for its backward pass."""

    training: bool
    autocast: torch.dtype | None  # for a box that does not run in full precision
    forward: Pass = Pass()
    parameters: list[Tensor | None] | None = None  # of a box that is a module


def differentiate(
    layer: "BlackBox", how: Circumstances, x: Tensor, y: Tensor, gy: Tensor, context: tuple[Tensor, ...]
) -> Tensor:
    """The gradient [B, d] at x [B, d], where the box lives.

    Changes of state come last, so that a box that fails leaves none. Then come the hooks.
    """
    memory = layer.memory
    with memory.kept() if isinstance(memory, Snapshots) else contextlib.nullcontext():
        g, step = _differentiate(layer, how, arguments.inside(layer.limits, x), y, gy, context)
    if is_capturing(x.device):
        layer._trace.captured.append(step)
    else:
        layer._run_hooks(step)
    return g


def _differentiate(
    layer: "BlackBox", how: Circumstances, x: Tensor, y: Tensor, gy: Tensor, context: tuple[Tensor, ...]
) -> tuple[Tensor, Step]:
    """See `differentiate`. Rows may be sequences, [B, T·d]; to the policy every time step is a row."""
    d, policy, policy_state, findings = layer.in_features, layer.policy, layer.policy_state, layer.findings
    estimator, schedule = layer.estimator, policy_state.schedule
    rows = x.reshape(-1, d) if x.shape[1] != d else x
    noise = half_width(layer, x.dtype)
    capturing = is_capturing(x.device)
    asking = Asking(layer, x, y, context, how.forward.recall)
    found: Found | None = None
    if findings is not None and how.training and not capturing and findings.due(x.shape[1] // d):
        rounding = layer._function.rounding or torch.finfo(x.dtype).eps
        found = asking.run(lambda: findings.look(asking.scene(noise, rounding)))
    structure = layer.structure if found is None else found.structure

    generator = policy_state.random.on(x.device) if capturing else policy_state.random.fork(x.device)
    state = policy_state.read(x.device)
    ranks, joint_rows, first, sums, _ = how.forward.part
    batch = Batch(rows, generator, joint_rows or rows.shape[0], first, None if sums is None else sums.to(x.device))
    begins = policy.share > 0 and schedule.trials == 0
    if policy.share > 0 and ranks > 1:  # what all processes have begun with may not have been exchanged yet
        begins = policy.lost(state)
    if begins and capturing:
        raise BoxError("a policy that measures its steps has to run once before it is captured: use GraphedStep")
    trying = how.training and not capturing and trial_due(layer)
    tries = Tries(asking, structure, gy, batch) if begins or trying else None
    if tries is not None and len(tries.live) == 0:  # the loss asks for no gradient
        begins = trying = False
    asked = layer._function.evaluations
    if begins and tries is not None:
        state = layer._trace.begin(how.training, lambda: policy.start(state, tries.first()), x.device)
        trying &= tries.heard  # else it begins anew at the next step
    elif trying and tries is not None and policy.share == 0:  # noise="auto": the policy's own steps might be too long
        learn(layer, tries.scout(batch), y, layer._function.evaluations - asked)
        trying, noise = False, half_width(layer, x.dtype)
    steps = policy.steps(state, batch, estimator.draws, noise)
    before = layer._function.evaluations
    delta = moves(x, steps.size, steps.sign, policy.least_ulps)
    raw = asking.slopes(structure, gy, delta)
    g = usable(raw, gy)
    after = layer._function.evaluations
    trial = tries.trial(steps, raw) if tries is not None and trying else None
    asked = before - asked + layer._function.evaluations - after  # to try things out

    g_rows = g.reshape(rows.shape)
    new_state, summary = state, None
    if how.training and (trial is not None or policy.share == 0 or ranks > 1):
        # Wrappers average the gradient over the processes, so a row has a share of what it would have alone.
        summary = policy.summarize(state, g_rows if ranks == 1 else g_rows / ranks, steps, trial, estimator)
        if ranks == 1:
            new_state = policy.observe(state, summary, rows.shape[0], estimator)
    if estimator.normalize_rows:
        g_rows = normalized(g_rows) * ranks  # of which the wrappers leave one share

    trace = layer._trace
    if asking.failed:
        trace.add_failures(torch.stack(asking.failed).sum(), raises=layer.on_failure == "raise")
    trace.last = steps
    if how.training:
        policy_state.random.join(x.device, generator)
        if ranks > 1 and summary is not None:
            policy_state.ranks.remember(how.forward.part, summary)
        else:
            policy_state.write(new_state)
        if tries_out(layer):
            schedule.step(after - before)
        if trial is not None:
            learn(layer, trial, y, asked)
            if ranks == 1 and policy.lost(new_state):
                schedule.begin()
        if findings is not None:
            if found is not None:
                findings.accept(found)
            findings.credit += after - before
    g = g_rows.view(x.shape)
    step = Step(x, gy, g)
    if structure.in_time:
        step = Step(*(t.reshape(len(x), x.shape[1] // d, -1) for t in step))
    return g, step


def usable(slopes: Tensor, gy: Tensor) -> Tensor:
    """The gradient [B, W] from slopes of which some may not be finite.

    What could not be estimated is zero; but where the loss's own gradient is not finite neither is ours, as loss
    scalers expect.
    """
    if look_is_free(slopes.device) and math.isfinite(slopes.sum()):
        return slopes
    return slopes.nan_to_num(0, 0, 0) + (gy * 0).sum(1, keepdim=True)


def normalized(g: Tensor) -> Tensor:
    """Rows of g [B, d] scaled to norm 1; rows of zeros stay zero."""
    # Scaled to a largest entry of 1 first, lest the squares of the norm over- or underflow.
    g = g / g.abs().amax(1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny)
    return torch.nn.functional.normalize(g, dim=1)
