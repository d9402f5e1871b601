"""Whether the same question gets the same answer, and if not, where the difference comes from."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bondgrad.calling._modules import in_eval_mode
from bondgrad.errors import BoxError
from bondgrad.measuring._no_trace import RandomStates
from bondgrad.probing._asker import Asker, LeftOut
from bondgrad.probing._words import percent

ROWS, REPEATS = 16, 16
NOISIEST = 4  # rows at which the source is looked for
CHECKS = 4  # of the source of random numbers
OWNERS = {"torch": "torch's generator", "numpy": "numpy's global generator", "python": "Python's random module"}


@dataclass(frozen=True)
class Randomness:
    """What happens when the same rows are asked again."""

    deterministic: bool  # up to rounding
    exact: bool  # to the last bit
    moving: bool  # without noise, but in one direction: see History
    std: list[float]  # of every output
    half_width: list[float]  # of every output: 95 of 100 answers lie no farther from their mean
    relative: float  # standard deviation over the spread of the outputs, root mean square
    within_a_call: bool  # whether the same row twice in a call gets two answers
    by_place: bool  # whether these two answers are the same in every call
    generator: str | None  # the global random numbers that it draws from: "torch", "numpy", "python"
    takes_seed: bool  # a keyword `seed` makes it repeat itself
    modules: list[str]  # that are random or look at the whole batch, in training mode
    quiet_in_eval: bool | None  # a module: whether it repeats itself in eval mode. None: not tried
    repeats: int

    @property
    def noise(self) -> float:
        """One half-width for all outputs: root mean square."""
        return math.sqrt(sum(b * b for b in self.half_width) / len(self.half_width))

    @property
    def repeatable(self) -> bool:
        """Whether two calls can be made to draw the same random numbers."""
        return self.generator is not None or self.takes_seed

    @property
    def words(self) -> str:
        """What a person wants to know."""
        if self.deterministic:
            if self.moving:
                return "Asked again, its answers have no noise, but move on steadily."
            same = "to the last bit" if self.exact else "up to rounding"
            return f"Asked again, it gives the same answers {same}."
        text = f"Random: 95 of 100 answers lie within ±{self.noise:.2g} ({percent(self.relative)} of the spread, "
        text += f"standard deviation {max(self.std):.2g} at most)."
        if self.by_place:
            text += " The same noise comes in every call, by place in the call: as if its seed were reset in each."
        elif not self.within_a_call:
            text += " All rows of a call share the same noise."
        if self.takes_seed:
            text += " It takes a seed: two calls with the same one agree."
        elif self.generator is not None:
            text += f" It draws from {OWNERS[self.generator]}: reset that, and it repeats itself."
        elif not self.by_place:
            text += " No global random numbers were found behind it: a device, or a generator of its own."
        if self.modules:
            text += f" In training mode: {', '.join(self.modules)}."
        if self.quiet_in_eval:
            text += " In eval mode, in which BlackBox keeps a module, it repeats itself."
        return text


def measure_randomness(asker: Asker, generator: torch.Generator) -> Randomness:
    """Ask some rows again and again; if the answers differ, look for the source."""
    repeats = max(3, min(REPEATS, asker.affordable() // 20, asker.affordable_calls() // 8))
    rows = asker.choose(min(ROWS, max(1, asker.affordable() // 100)), generator)
    if asker.least > len(rows):
        rows = rows.repeat(asker.least)
    x = asker.x[rows]
    asker.ask(x, rows)  # whatever was asked before, from here on the question before is the same
    again = torch.stack([asker.ask(x, rows) for _ in range(repeats)], 1)  # [r, repeats, d_out]
    together = again
    if asker.most > 1:
        together = asker.ask(x.repeat_interleave(repeats, 0), rows.repeat_interleave(repeats)).view_as(again)
    failed = ~torch.isfinite(torch.stack((again, together))).all(3)  # [2, r, repeats]
    asker.doubt(int(failed[:, ~failed.all(2).all(0)].sum()))
    _learn_noise(asker, again, together)
    noise, rounding = asker.noise, asker.rounding
    deterministic = not bool((noise > 0).any())
    fn = asker.function.fn
    found: dict[str, Any] = {"generator": None, "takes_seed": False, "quiet_in_eval": None}
    names = restless(fn)
    with contextlib.suppress(LeftOut):  # the noise is worth more than its source
        if names and isinstance(fn, nn.Module):
            with in_eval_mode(fn):
                one, other = asker.ask(x, rows), asker.ask(x, rows)
            found["quiet_in_eval"] = same(one, other, exactly(asker))
        if not deterministic:
            by_row = torch.stack([(deviation(again[[i]]) / asker.output_spread).norm() for i in range(len(rows))])
            noisiest = by_row.topk(min(len(rows), max(NOISIEST, asker.least))).indices
            x, rows = x[noisiest], rows[noisiest]
            found["takes_seed"] = _takes_seed(asker, x, rows)
            many = repeats if asker.most > 1 else 1
            if not asker.by_place:
                found["generator"] = _find_generator(asker, x.repeat(many, 1), rows.repeat(many))
    half = torch.maximum(_half_width(again), _half_width(together))
    half = torch.where(half > 0, half, 2 * noise)  # of noise that is nearly always absent
    still = (again - again[:, :1]).nan_to_num(0)
    return Randomness(
        deterministic=deterministic,
        exact=not bool((still != 0).any()),
        moving=deterministic and not bool((still[:, -1].abs() <= rounding).all()),
        std=noise.tolist(),
        half_width=torch.where(noise > 0, half, 0.0).tolist(),
        relative=float((noise / asker.output_spread).square().mean().sqrt()),
        within_a_call=not asker.shared,
        by_place=asker.by_place,
        modules=names,
        repeats=repeats,
        **found,
    )


def _learn_noise(asker: Asker, again: Tensor, together: Tensor) -> None:
    """What answers [r, repeats, d_out] to the same questions, in several calls and in one, say of the noise.

    The same calls agree to the last bits but for noise. Within a call rounding may go by place.
    """
    unit, rounding = exactly(asker), asker.rounding
    between, within = deviation(again), deviation(together)
    random, placed = between > unit, (between <= unit) & (within > rounding)
    far = torch.stack([(t - t.nanmean(1, keepdim=True)).abs().nan_to_num(0).amax((0, 1)) for t in (again, together)])
    asker.shared = asker.most > 1 and bool(random.any()) and bool((within <= torch.maximum(unit, between / 10)).all())
    asker.by_place = bool(placed.any()) and not bool(random.any())
    asker.noise = torch.where(random | placed, torch.maximum(between, within), 0.0)
    asker.largest = torch.where(random | placed, far.amax(0), 0.0)


def deviation(answers: Tensor) -> Tensor:
    """[d_out] standard deviation of answers [r, repeats, d_out] to the same questions, one after the other.

    From second differences, which a steady drift does not change.
    """
    second = answers.diff(dim=1).diff(dim=1)
    return second.square().nanmean((0, 1)).nan_to_num(0).div(6).sqrt()


def _half_width(answers: Tensor) -> Tensor:
    """[d_out] half of the range in which 95 of 100 answers [r, repeats, d_out] lie."""
    k = answers.shape[1]
    off = (answers - answers.nanmedian(1, keepdim=True).values) * math.sqrt(
        k / (k - 1)
    )  # the middle follows the answers
    return off.abs().flatten(0, 1).nanquantile(0.95, dim=0).nan_to_num(0)


def exactly(asker: Asker) -> Tensor:
    """[d_out] by how much answers to the same call may differ without noise."""
    return 2 * asker.eps * asker.scale


def same(one: Tensor, other: Tensor, rounding: Tensor) -> bool:
    """Whether answers [n, d_out] agree up to rounding [d_out]."""
    return bool(((one - other).abs().nan_to_num(0) <= rounding).all())


def _find_generator(asker: Asker, x: Tensor, rows: Tensor) -> str | None:
    """The global random numbers that have to be reset for the box to repeat itself, and only if they are."""
    return next((name for name in OWNERS if _repeats_itself(asker, x, rows, name)), None)


def _repeats_itself(asker: Asker, x: Tensor, rows: Tensor, name: str) -> bool:
    """Whether it does whenever those random numbers are reset, and hardly ever otherwise: noise may be rare."""
    differed = 0
    for _ in range(CHECKS):
        before = RandomStates()
        one = asker.ask(x, rows)
        before.restore(name)
        other, control = asker.ask(x, rows), asker.ask(x, rows)
        if not same(one, other, exactly(asker)):
            return False
        differed += not same(one, control, exactly(asker))
    return differed >= CHECKS - 1


def _takes_seed(asker: Asker, x: Tensor, rows: Tensor) -> bool:
    """Whether fn has a parameter `seed`, and repeats itself when it is given the same."""
    if asker.function.seed_position is None:
        return False
    x, rows = x[: asker.most], rows[: asker.most]
    asker.seed = 0
    try:
        return same(asker.call(x, rows), asker.call(x, rows), exactly(asker))
    except BoxError:
        return False
    finally:
        asker.seed = None


def restless(fn: object) -> list[str]:
    """The parts of a module that are random, or mix the rows of a batch, in training mode: in words."""
    counts: dict[str, int] = {}
    for module in fn.modules() if isinstance(fn, nn.Module) else ():
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            name = f"dropout (p = {module.p:g})"
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            name = "batch normalisation"
        elif isinstance(module, nn.RReLU):
            name = "randomised ReLU"
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout:
            name = "dropout inside " + type(module).__name__
        else:
            continue
        counts[name] = counts.get(name, 0) + 1
    return [name if n == 1 else f"{n} layers of {name}" for name, n in counts.items()]
