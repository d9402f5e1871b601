"""What second differences say that are seen ever closer."""

import pytest
import torch

from bondgrad.probing._smoothness import Smoothness, judge_bends


def judged(*bends, least=1e-12):
    """By the largest bends of every zoom, on one line."""
    bends = torch.tensor(bends, dtype=torch.float64)[:, None]
    return judge_bends(bends, torch.full_like(bends, least))


@pytest.mark.parametrize(
    ("order", "kind"),
    [(2, "smooth"), (1.51, "smooth"), (1.49, "kinks"), (1, "kinks"), (0.41, "kinks"), (0.39, "jumps"), (0, "jumps")],
)
def test_the_power_with_which_bends_fall(order, kind):
    """A zoom makes distances eight times shorter."""
    found = judged(1.0, 8.0**-order, 64.0**-order)
    assert found.kind == kind
    assert found.order == pytest.approx(order)
    assert found.jump == (pytest.approx(64.0**-order) if kind == "jumps" else 0)


def test_the_closest_look_counts_and_the_roughest_line():
    bends = torch.tensor([[1.0, 1.0], [1.0, 1 / 64], [1 / 64, 1 / 512]], dtype=torch.float64)
    found = judge_bends(bends, torch.full_like(bends, 1e-12))
    assert found.order == pytest.approx(1)
    assert found.kind == "kinks"


def test_bends_that_are_not_seen_say_nothing():
    assert judged(1.0, 0.125, 1e-3, least=0.01) == Smoothness("kinks", pytest.approx(1), 0.0)  # the last is hidden
    assert judged(1.0, 1e-9, 1e-9, least=1e-3).kind == "smooth"  # it fell by at least a thousand
    assert judged(1.0, 1e-9, 1.0, least=0.1).kind == "unclear"  # what comes after is another bend
    assert judged(0.5, 0.5, 0.5, least=1.0).kind == "unclear"
    assert judged(0.01, 0.01, 0.01, least=0.019).kind == "smooth"
    assert judged(0.01, 0.01, 0.01, least=0.021).kind == "unclear"


def test_words():
    assert Smoothness("jumps", 0.0, 0.25).words.startswith("It jumps, by up to 25 % of the spread")
    assert "drowns" in Smoothness("unclear", None, 0.0).words
