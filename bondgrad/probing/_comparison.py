"""Whether answers to several questions about the same rows differ by more than chance makes them differ."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from bondgrad.measuring._sampler import Sampler
from bondgrad.probing._facts import Facts

T = TypeVar("T")
NOISY_REPEATS = 4  # of every comparison, where answers are noisy: what is rare then shows in the deviations


def confirmed(facts: Facts, compared: Callable[[], tuple[bool, T]]) -> tuple[bool, T]:
    """What a comparison finds; if it is a difference between noisy answers, which a few bad ones may make, twice."""
    found = compared()
    return compared() if found[0] and facts.noisy else found


def compare(
    sampler: Sampler, facts: Facts, questions: Sequence[Callable[[], Tensor]], rows: int
) -> tuple[bool, Tensor]:
    """Whether answers [r, d_out] to questions about the same rows differ by more than noise and rounding make.

    Args:
        sampler: The box.
        facts: What is known of it.
        questions: k functions, each of which makes one call.
        rows: Most rows of such a call.

    Returns:
        Whether they differ, and [k - 1, r, d_out] by how much from those to the first question, on average.
    """
    k, repeats = len(questions), NOISY_REPEATS if facts.noisy else 1
    sampler.require(4 * repeats * k * rows, calls=2 * repeats * k)

    def compared() -> tuple[bool, Tensor]:
        answers: list[list[Tensor]] = [[] for _ in questions]
        # There and back again: what drifts steadily has drifted equally for each of them.
        for i in [*range(k), *reversed(range(k))] * repeats:
            facts.settle(sampler)
            answers[i].append(questions[i]())
        y = torch.stack([torch.stack(found) for found in answers])  # [k, n, r, d_out]
        n, mean = y.shape[1], y.nanmean(1)
        off = (y - mean[:, None]).abs().nan_to_num(0)
        # Some rows may be noisier than others, and some answers lie far out.
        own = torch.maximum(6 * off.square().mean((0, 1)).mul(2 / n).sqrt(), 2.5 * off.amax((0, 1)) / n)
        change = (mean[1:] - mean[0]).nan_to_num(0)
        return bool((change.abs() > torch.maximum(facts.certain(n), own)).any()), change

    return confirmed(facts, compared)
