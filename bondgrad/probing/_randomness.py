"""Whether repeated evaluations of the same rows give the same outputs, and if not, the source of the noise."""

import contextlib
import math
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bondgrad.calling._modules import in_eval_mode
from bondgrad.measuring._no_trace import RandomStates
from bondgrad.measuring._noise import noise_from_repeats
from bondgrad.measuring._sampler import BudgetExceeded, Sampler
from bondgrad.probing._facts import HARMLESS, Facts
from bondgrad.probing._number_format import percent, sentences

GENERATORS = {"torch": "torch's generator", "numpy": "numpy's global generator", "python": "Python's random module"}


@dataclass(frozen=True)
class RandomnessSettings:
    """How many rows are evaluated repeatedly, and how often."""

    rows: int = 16  # rows that are repeated; times `repeats`, enough for a standard deviation within a tenth
    repeats: int = 16  # repeats of every row
    noisiest: int = 4  # number of rows, those with most noise, at which its source is searched for
    checks: int = 4  # pairs of calls with a generator reset between them, and as many without, to find the source


SETTINGS = RandomnessSettings()


@dataclass(frozen=True)
class Randomness:
    """How outputs differ when the same rows are evaluated repeatedly."""

    deterministic: bool  # whether outputs repeat up to rounding
    exact: bool  # whether outputs repeat to the last bit
    moving: bool  # whether outputs have no noise, but drift: see `History`
    std: list[float]  # standard deviation of the noise of every output
    largest: list[float]  # largest deviation from the median, of every output
    half_width: list[float]  # half-width of the noise of every output: 95 of 100 deviations are smaller
    relative: float  # root mean square of the standard deviations, in units of the output spread
    within_a_call: bool  # whether copies of a row in the same call have different noise
    by_place: bool  # whether the noise depends on the place in the call alone, and is the same in every call
    modules: list[str]  # submodules in training mode that are random or mix the rows of a batch
    generator: str | None = None  # the global generator behind the noise: "torch", "numpy", "python". None: not found
    takes_seed: bool = False  # whether fn takes a keyword `seed`, and outputs repeat if it is the same
    quiet_in_eval: bool | None = None  # whether the outputs of a module repeat in eval mode. None: not tried

    @property
    def noise(self) -> float:
        """Root mean square of the half-widths over outputs."""
        return math.sqrt(sum(b * b for b in self.half_width) / len(self.half_width))

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        if self.deterministic and self.moving:
            return "Asked again, its answers have no noise, but move on steadily."
        if self.deterministic:
            return f"Asked again, it gives the same answers {'to the last bit' if self.exact else 'up to rounding'}."
        relative = f"{percent(self.relative)} of the spread, standard deviation {max(self.std):.2g} at most"
        reseeded = "The same noise comes in every call, by place in the call: as if its seed were reset in each."
        source = "No global random numbers were found behind it: a device, or a generator of its own."
        if self.generator is not None:
            source = f"It draws from {GENERATORS[self.generator]}: reset that, and it repeats itself."
        return sentences(
            f"Random: 95 of 100 answers lie within ±{self.noise:.2g} ({relative}).",
            reseeded if self.by_place else not self.within_a_call and "All rows of a call share the same noise.",
            "It takes a seed: two calls with the same one agree." if self.takes_seed else not self.by_place and source,
            bool(self.modules) and f"In training mode: {', '.join(self.modules)}.",
            self.quiet_in_eval and "In eval mode, in which BlackBox keeps a module, it repeats itself.",
        )


def measure_randomness(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Randomness:
    """Evaluate some rows repeatedly; if the outputs differ, search for the source of the noise."""
    caller = sampler.caller
    repeats = max(3, min(SETTINGS.repeats, sampler.affordable // 20, sampler.affordable_calls // 8))
    count = min(SETTINGS.rows, max(1, sampler.affordable // 100))
    rows = facts.choose(max(count, caller.smallest), generator)
    sampler.ask_rows(rows)  # so that the call before each of the following ones is the same
    # Outputs [r, repeats, d_out] each: of repeated calls, and of copies of the rows in one call.
    again = torch.stack([sampler.ask_rows(rows) for _ in range(repeats)], 1)
    together = sampler.ask_rows(rows.repeat_interleave(repeats)).view_as(again) if caller.largest > 1 else again
    failed = ~torch.isfinite(torch.stack((again, together))).all(3)  # [2, r, repeats]
    caller.count_random_failures(int(failed[:, ~failed.all((0, 2))].sum()))
    found = judge_repeats(facts, again, together, stochastic_modules(sampler.function.fn))
    with contextlib.suppress(BudgetExceeded):  # the noise is reported even if its source is not found
        if found.modules:
            with in_eval_mode(sampler.function.fn):
                found = replace(found, quiet_in_eval=_agree(sampler, facts, rows))
        if not found.deterministic:
            by_row = noise_from_repeats(again, 1, 2, (1,)).div(facts.output_spread).norm(dim=1)
            rows = rows[by_row.topk(min(len(rows), max(SETTINGS.noisiest, caller.smallest))).indices]
            found = replace(found, takes_seed=_takes_seed(sampler, facts, rows))
        if not found.deterministic and not found.by_place:
            rows = rows.repeat(repeats if caller.largest > 1 else 1)
            drawn = (name for name in GENERATORS if _draws_from(sampler, facts, rows, name))
            found = replace(found, generator=next(drawn, None))
    return found


def judge_repeats(facts: Facts, again: Tensor, together: Tensor, modules: list[str]) -> Randomness:
    """Randomness from outputs [r, repeats, d_out] at the same rows: `again` in several calls, `together` in one.

    Without noise, equal calls agree to the last bits; within a call, rounding may depend on the place. Standard
    deviations are taken from second differences, which a steady drift does not change.
    """
    unit, repeats, both = facts.repeat_tolerance, again.shape[1], torch.stack((again, together))
    between, within = (noise_from_repeats(y, 1, 2, (0, 1)) for y in both)  # [d_out]
    # A solver that starts from its last answer changes with the place, too, but by its tolerance only.
    least = torch.maximum(facts.tolerance, HARMLESS * facts.output_spread)
    random, placed = between > unit, (between <= unit) & (within > least)
    std = torch.where(random | placed, torch.maximum(between, within), 0.0)
    off = (both - both.nanmedian(2, keepdim=True).values).abs() * math.sqrt(repeats / (repeats - 1))  # Bessel
    half = off.flatten(1, 2).nanquantile(0.95, dim=1).nan_to_num(0).amax(0)
    half = torch.where(half > 0, half, 2 * std)  # if noise is nearly always absent
    shared = together is not again and bool(random.any() & (within <= torch.maximum(unit, between / 10)).all())
    still, steady = (again - again[:, :1]).nan_to_num(0), not bool((std > 0).any())
    return Randomness(
        deterministic=steady,
        exact=not bool((still != 0).any()),
        moving=steady and not bool((still[:, -1].abs() <= facts.tolerance).all()),
        std=std.tolist(),
        largest=torch.where(std > 0, off.nan_to_num(0).amax((0, 1, 2)), 0.0).tolist(),
        half_width=torch.where(std > 0, half, 0.0).tolist(),
        relative=facts.relative(std),
        within_a_call=not shared,
        by_place=bool(placed.any()) and not bool(random.any()),
        modules=modules,
    )


def _agree(sampler: Sampler, facts: Facts, rows: Tensor, resetting: str | None = None) -> bool:
    """Whether two calls with the same rows agree, with the global generator `resetting`, if given, reset in between."""
    before = RandomStates()
    one = sampler.ask_rows(rows)
    if resetting is not None:
        before.restore(resetting)
    return bool(((one - sampler.ask_rows(rows)).abs() <= facts.repeat_tolerance).all())


def _takes_seed(sampler: Sampler, facts: Facts, rows: Tensor) -> bool:
    """Whether fn has a parameter `seed`, and two calls with the same seed agree."""
    try:
        sampler.seed = 0
        return sampler.function.seed_position is not None and _agree(sampler, facts, rows)
    finally:
        sampler.seed = None


def _draws_from(sampler: Sampler, facts: Facts, rows: Tensor, name: str) -> bool:
    """Whether calls always agree if the global generator `name` is reset in between, and hardly ever otherwise."""
    checks = range(SETTINGS.checks)
    repeats = all(_agree(sampler, facts, rows, name) for _ in checks)
    return repeats and sum(_agree(sampler, facts, rows) for _ in checks) <= 1  # rare noise may be absent


def stochastic_modules(fn: object) -> list[str]:
    """Descriptions of the submodules in training mode that are random or mix the rows of a batch."""
    modules = fn.modules() if isinstance(fn, nn.Module) else ()
    counts = Counter(_stochastic_kind(module) for module in modules if module.training)
    return [name if n == 1 else f"{n} layers of {name}" for name, n in counts.items() if name]


def _stochastic_kind(module: nn.Module) -> str:
    """A description of a module that is random or mixes the rows of a batch; empty if it does neither."""
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        return f"dropout (p = {module.p:g})"
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "batch normalisation"
    if isinstance(module, nn.RReLU):
        return "randomised ReLU"
    inside = isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout
    return "dropout inside " + type(module).__name__ if inside else ""
