"""Whether answers to several questions about the same rows differ by more than chance makes them differ."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bondgrad.measuring._sampler import Sampler
from bondgrad.probing._facts import Facts

NOISY_REPEATS = 4  # of every comparison, where answers are noisy: what is rare then shows in the deviations


def most_calls(facts: Facts, questions: int, calls: int = 1) -> int:
    """Calls that comparing so many questions takes at most, where each of them takes so many calls."""
    repeats = 2 * NOISY_REPEATS if facts.noisy else 1  # and once more, to confirm
    return 2 * repeats * questions * (calls + facts.remembers)


def compare(
    sampler: Sampler, facts: Facts, questions: Sequence[Callable[[], Tensor]], confirmed: bool = False
) -> tuple[bool, Tensor]:
    """Whether answers [r, d_out] to questions about the same rows differ from those to the first question.

    They do if they differ by more than noise and rounding make, and not by chance only: a difference between noisy
    answers may come of a few bad ones, and is looked for once more.

    Args:
        sampler: The box.
        facts: What is known of it.
        questions: k functions, each of which asks the box.
        confirmed: Whether a difference was seen before: this is the second look.

    Returns:
        Whether they differ, and [k - 1, r, d_out] by how much on average.
    """
    k = len(questions)
    answers: list[list[Tensor]] = [[] for _ in questions]
    # There and back again: what drifts steadily has drifted equally for each of them.
    for i in [*range(k), *reversed(range(k))] * (NOISY_REPEATS if facts.noisy else 1):
        facts.settle(sampler)
        answers[i].append(questions[i]())
    y = torch.stack([torch.stack(found) for found in answers])  # [k, n, r, d_out]
    n, mean = y.shape[1], y.nanmean(1)
    off = (y - mean[:, None]).abs().nan_to_num(0)
    # Some rows may be noisier than others, and some answers lie far out.
    own = torch.maximum(6 * off.square().mean((0, 1)).mul(2 / n).sqrt(), 2.5 * off.amax((0, 1)) / n)
    change = (mean[1:] - mean[0]).nan_to_num(0)
    differ = bool((change.abs() > torch.maximum(facts.certain(n), own)).any())
    return (differ, change) if confirmed or not differ or not facts.noisy else compare(sampler, facts, questions, True)
