"""The backward pass: from perturbations, through evaluations, to the gradient at the box's inputs."""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bondgrad.errors import BoxError
from bondgrad.policies import Batch, MeasuringPolicy, Observation, Policy, State
from bondgrad.step._health import TrialResult
from bondgrad.step._neighbourhood import Neighbourhood
from bondgrad.step._perturbations import draw
from bondgrad.step._records import HostChanges, Step, StepInputs, StepResult
from bondgrad.step._trials import TrialRows, assumed_noise, result_of, rows_of, trial_due
from bondgrad.structure import Structure
from bondgrad.structure.discovery._tracker import Discovery
from bondgrad.torch_support import _device as device

if TYPE_CHECKING:
    from bondgrad.step._ahead import Taken


def take_step(step: StepInputs) -> StepResult:
    """One backward pass, as a function: it changes no state, and returns everything that it found out.

    Rows may be sequences, [B, T·d]; to the policy every time step is a row.
    """
    policy, estimator = step.parts.policy, step.parts.estimator
    box = Neighbourhood(step.parts, step.x, step.y, step.context, step.forward.states)
    batch = rows_of(step)
    discovery = search_structure(step, box)
    if discovery is not None:
        box.structure = discovery.structure
    start = prepare(step, box, batch)

    steps, delta, known = take_ahead(step, start, box.structure) or (
        *draw(step.parts, start.state, batch, start.noise),  # delta [n, B·T, d]
        None,
    )
    slopes = box.slopes(step.gy, shaped(delta, delta.shape[:1] + step.x.shape), known)  # [B, W]
    g = shaped(usable(slopes, step.gy), batch.x.shape)  # [B·T, d]

    looks = start.rows is not None and isinstance(policy, MeasuringPolicy) and policy.looks_for_jumps(start.state)
    trial = None if start.rows is None else start.rows.trial(steps, slopes, looks)
    summary, state = learn(step, start.state, Observation(batch.x, g, steps, estimator.differences, trial))
    if estimator.normalize_rows:
        g = normalized(g) * step.forward.part.ranks  # of which the wrappers leave one share
    g = shaped(g, step.x.shape)
    failures = [count for counts in box.failures.values() for count in counts]
    return StepResult(
        g=g,
        changes=HostChanges(steps, seen_by_hooks(step, g), step.forward.training, box.evaluations["gradient"]),
        generator=batch.generator,
        failures=torch.stack(failures).sum() if failures else None,
        state=state,
        summary=summary,
        discovery=discovery,
        noise_trial=start.noise_trial,
        trial=None if trial is None else result_of(trial, step, box.evaluations["trial"], start.state),
        restart=trial is not None and state is not None and needs_start(policy, state),
        eval_start=start.eval_start,
        errors=tuple(box.errors),
    )


def shaped(t: Tensor, shape: torch.Size) -> Tensor:
    """The same as `t.reshape(shape)`, but free where t has that shape already, as it has for all but sequences."""
    return t if t.shape == shape else t.reshape(shape)


def needs_start(policy: Policy, state: State) -> bool:
    """Whether the policy is one that measures its steps and has none."""
    return isinstance(policy, MeasuringPolicy) and policy.needs_start(state)


def search_structure(step: StepInputs, box: Neighbourhood) -> Discovery | None:
    """Search the structure of the box, if the tracker says that a search is due."""
    tracker, time = step.tracker, step.x.shape[1] // step.parts.in_features
    if tracker is None or not step.forward.training or step.capturing or not tracker.due(time):
        return None
    rounding = step.parts.function.rounding or torch.finfo(step.x.dtype).eps
    noise = assumed_noise(step, step.schedule.noise)
    return box.run(lambda: tracker.search(box.search_batch(noise, rounding)))


class Start(NamedTuple):
    """What the policy chooses its steps from, and what was measured to get there."""

    state: State  # the policy's
    noise: float  # half-width
    rows: TrialRows | None = None  # at which other steps are to be tried; None: at none
    noise_trial: TrialResult | None = None  # of a trial that was made to measure the noise
    eval_start: State | None = None


def prepare(step: StepInputs, box: Neighbourhood, batch: Batch) -> Start:
    """Find a first step for a policy that needs one, or measure the noise for one that asks for it."""
    policy, training = step.parts.policy, step.forward.training
    start = Start(step.state, assumed_noise(step, step.schedule.noise), eval_start=step.eval_start)
    measuring = policy if isinstance(policy, MeasuringPolicy) else None
    begins = measuring is not None and step.schedule.trials == 0
    if step.forward.part.ranks > 1:  # what all processes began with may not have been exchanged yet
        begins = needs_start(policy, step.state)
    if begins and step.capturing:
        raise BoxError("a policy that measures its steps has to run once before it is captured: use GraphedStep")
    trying = training and not step.capturing and trial_due(policy, step.noise, step.schedule)
    rows = TrialRows(step, box, batch) if begins or trying else None
    if rows is None or len(rows.live) == 0:  # the loss asks for no gradient
        return start
    if measuring is not None and begins:
        state = step.eval_start
        # Eval mode leaves the policy's state alone, but does not look for a first step twice.
        if training or state is None or next(iter(state.values())).device != batch.x.device:
            state, grid = measuring.start(step.state, rows.starting_point()), step.parts.grid
            state = state if grid is None else measuring.settable(state, grid)
        start = start._replace(state=state, eval_start=step.eval_start if training else state)
        trying &= rows.answered  # without any answer, the next step looks for a first step again
    elif measuring is None:  # noise="auto": the policy's own steps might be too long to try
        found = result_of(rows.trial_at_first_step(batch), step, box.evaluations["trial"], start.state)
        return start._replace(noise=assumed_noise(step, found.noise), noise_trial=found)
    return start._replace(rows=rows if trying else None)


def take_ahead(step: StepInputs, start: Start, structure: Structure) -> "Taken | None":
    """The evaluations that began in the forward pass; None: there are none that fit this step."""
    if step.ahead is None:
        return None
    same_steps = start.state is step.state and start.noise_trial is None
    if not same_steps or step.ahead.structure is not structure:
        # A search found something, or another forward pass was differentiated meanwhile, and changed what is due.
        step.ahead.drop()
        return None
    return step.ahead.take(step.forward.kept)


def learn(step: StepInputs, state: State, seen: Observation) -> tuple[Tensor | None, State | None]:
    """What the policy learns: a summary for the other processes, or, where there are none, its new state."""
    policy, part = step.parts.policy, step.forward.part
    if not step.forward.training:
        return None, None
    learns = bool(state) and (seen.trial is not None or not isinstance(policy, MeasuringPolicy))
    if part.ranks == 1 and not learns:
        return None, None if state is step.state else state
    # Wrappers average the gradient over the processes, so a row has a share of what it would have alone.
    if part.ranks > 1:
        return policy.summarize(state, seen._replace(g=seen.g / part.ranks)), None
    summary = policy.summarize(state, seen)
    return None, policy.observe(state, summary, seen.g.shape[0], seen.differences)


def usable(slopes: Tensor, gy: Tensor) -> Tensor:
    """The gradient [B, W] from slopes of which some may not be finite.

    What could not be estimated is zero; but where the loss's own gradient is not finite neither is ours, as loss
    scalers expect.
    """
    if device.reading_is_free(slopes.device) and math.isfinite(slopes.sum()):
        return slopes
    return slopes.nan_to_num(0, 0, 0) + (gy * 0).sum(1, keepdim=True)


def normalized(g: Tensor) -> Tensor:
    """Rows of g [B, d] scaled to norm 1; rows of zeros stay zero."""
    # Scaled to a largest entry of 1 first, so that the squares in the norm neither overflow nor underflow.
    g = g / g.abs().amax(1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny)
    return torch.nn.functional.normalize(g, dim=1)


def seen_by_hooks(step: StepInputs, g: Tensor) -> Step:
    """The record that step hooks get. Rows of sequences have a dimension for time there."""
    seen = Step(step.x, step.gy, g)
    if not step.parts.structure.in_time:
        return seen
    batch, width = step.x.shape
    return Step(*(t.reshape(batch, width // step.parts.in_features, -1) for t in seen))
