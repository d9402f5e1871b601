"""What is said of a gradient, from evidence made by hand."""

import math

import pytest
import torch

from bondgrad import Check
from bondgrad.checking._evidence import Entries, Evidence
from bondgrad.checking._report import Obstacle, notes, percent, problems
from bondgrad.checking._stairs import Staircase

NAN = math.nan


def evidence(
    factor, wrong, error=0.001, unexplained=0.0, visible=0.02, missing=(), together=1.0, all_wrong=False, s=None, g=None
):
    """Of d inputs, of which some are wrong; by default of factors that explain all of the error."""
    d = len(factor)
    factor = torch.tensor([*factor, together]).double()
    wrong = torch.tensor([i in wrong for i in range(d)] + [all_wrong])
    s = (
        torch.randn(16, d, generator=torch.Generator().manual_seed(0)).double()
        if s is None
        else torch.tensor(s).double()
    )
    g = factor[:-1].nan_to_num(1) * s if g is None else torch.tensor(g).double()
    zeros, known = torch.zeros_like(s), torch.ones_like(s).bool()
    every = torch.ones(d).double()
    return Evidence(
        Entries(s, g, zeros, zeros, known, zeros, ~known),
        factor=factor,
        standard_error=torch.full_like(factor, error),
        unexplained=unexplained * every,
        error=(factor[:-1] - 1).abs(),
        visible=visible * every,
        enough=every.bool(),
        wrong=wrong,
        uniform=wrong,
        missing=torch.tensor([i in missing for i in range(d)]),
        bending=~every.bool(),
    )


def said(found, scale=1.0, tolerance=0.01):
    return problems(found, tolerance, torch.as_tensor(scale).double().expand(len(found.missing)))


@pytest.mark.parametrize(
    ("factor", "error", "words"),
    [
        (1.05, 0.0, "5.0 % too large"),
        (0.5, 4.9e-4, "50.0 % too small"),
        (0.5, 5e-4, "50.0 % ± 5e-02 % too small"),
        (0.9, 0.02, "10.0 % ± 2.0 % too small"),
        (1.99, 0.0, "99.0 % too large"),
        (2.0, 0.0, "2.00 times as large as it should be"),
        (0.0001, 0.0, "100.0 % too small"),
        (-0.81, 0.0, "wrong sign"),
        (-1.19, 0.0, "wrong sign"),
        (-1.2, 0.0, "wrong sign, and 1.20 times as large"),
        (-0.75, 0.0, "wrong sign, and 0.75 times as large"),
    ],
)
def test_a_factor_in_words(factor, error, words):
    assert said(evidence([1, factor], wrong=[1], error=error)) == (f"input 1: {words}",)


def test_nothing_is_said_of_what_is_not_wrong():
    assert said(evidence([1, 1.3], wrong=[])) == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"missing": [1]}, "not finite where the box is"),
        ({"g": [[1.0, 0.0]] * 16}, "zero, but the box depends on it"),
        ({"unexplained": 0.021}, "off by 10.0 % of its size, differently from row to row"),
        ({"unexplained": 0.02}, "10.0 % ± 0.1 % too large"),  # which would not have been seen by itself
        ({"unexplained": 0.03, "visible": 0.04}, "10.0 % ± 0.1 % too large"),
    ],
)
def test_what_is_wrong_with_one_input(settings, words):
    assert said(evidence([1, 1.1], wrong=[1], **settings)) == (f"input 1: {words}",)


def test_errors_without_a_factor():
    for size, words in ((9.99, "999.0 % of its size"), (10.0, "many times its size")):
        found = evidence([1, NAN], wrong=[1])._replace(error=torch.tensor([0, size]))
        assert said(found) == (f"input 1: off by {words}, differently from row to row",)


# ---- all inputs


def test_one_factor_for_all():
    found = {"wrong": [0, 1], "together": 1.1, "all_wrong": True}
    assert said(evidence([1.1, 1.1], **found)) == ("all inputs: 10.0 % ± 0.1 % too large",)
    assert said(evidence([1.1, NAN], **found)) == ("all inputs: 10.0 % ± 0.1 % too large",)
    # The tolerance and four standard errors apart.
    assert said(evidence([1.1, 1.1139], **found)) == ("all inputs: 10.0 % ± 0.1 % too large",)
    assert len(said(evidence([1.1, 1.1141], **found))) == 2
    assert len(said(evidence([1.1, 1.0859], **found))) == 2
    assert said(evidence([1.1, 1.2], **found), tolerance=0.1) == ("all inputs: 10.0 % ± 0.1 % too large",)
    assert len(said(evidence([1.1, 1.1], unexplained=0.021, **found))) == 2
    assert len(said(evidence([1.1, 1.1], missing=[1], **found))) == 2
    assert len(said(evidence([1.1, 1.1], **found | {"all_wrong": False}))) == 2
    assert said(evidence([1.1], wrong=[0], together=1.1, all_wrong=True)) == ("input 0: 10.0 % ± 0.1 % too large",)


def test_only_all_together():
    found = evidence([1.03, NAN], wrong=[], together=1.02, all_wrong=True, unexplained=1.0, error=0.02)
    assert said(found) == ("no input by itself, but all together: 2.0 % ± 2.0 % too large",)


@pytest.mark.parametrize("count", [8, 9, 12])
def test_eight_inputs_are_named(count):
    words = said(evidence([1 + 0.1 * (i + 1) for i in range(count)], wrong=range(count)))
    assert words[:8] == tuple(f"input {i}: {10.0 * (i + 1):.1f} % ± 0.1 % too large" for i in range(8))
    assert words[8:] == ((f"and {count - 8} more inputs",) if count > 8 else ())


# ---- swapped inputs


def test_swapped_inputs_in_their_own_units():
    """The gradients of inputs 0 and 2 have changed places; slopes are in units of the spread, which is 1 and 2."""
    s = [[1.0, 1.0, 6.0], [2.0, 1.0, -2.0], [-1.0, 1.0, 4.0]]
    g = [[3.0, 1.0, 2.0], [-1.0, 1.0, 4.0], [2.0, 1.0, -2.0]]
    found = evidence([3, 1, 0.3], wrong=[0, 2], s=s, g=g, unexplained=5.0)
    assert said(found, [1.0, 1.0, 2.0]) == ("inputs 0 and 2 look swapped",)
    assert len(said(found)) == 2  # in other units they are not
    few = found._replace(entries=found.entries._replace(known=torch.tensor([[True] * 3, [True] * 3, [False] * 3])))
    assert len(said(few, [1.0, 1.0, 2.0])) == 2  # two rows may be chance
    alone = found._replace(wrong=torch.tensor([True, False, False, False]))
    assert said(alone, [1.0, 1.0, 2.0]) == ("input 0: off by 200.0 % of its size, differently from row to row",)


@pytest.mark.parametrize(("off", "swapped"), [(0.19, True), (0.21, False)])
def test_swapped_inputs_are_alike_to_a_fifth(off, swapped):
    s = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    g = [[0.0, 1 + off], [0.0, 1 + off], [1.0, 0.0], [1.0, 0.0]]
    found = evidence([0.5, 0.5], wrong=[0, 1], s=s, g=g, unexplained=5.0)
    assert (said(found) == ("inputs 0 and 1 look swapped",)) is swapped


def test_an_input_like_two_others_is_not_swapped():
    s = [[1.0, 1.0, 1.0]] * 4
    found = evidence([3, 3, 3], wrong=[0, 1, 2], s=s, g=s, unexplained=5.0)
    assert len(said(found)) == 3


# ---- the whole text


def text(verdict, factor=(1.0, 1.0), visible=(0.01, 0.015), rate=(2.0, 1.0), error=(1e-6, 2e-3), problems=(), **rest):
    factor, visible, rate, error = (torch.tensor(t) for t in (factor, visible, rate, error))
    found = Check(verdict, factor, error, 0 * factor, visible, rate, 0.01, 123, problems, **rest)
    return str(found).split("\n  ")


LAST = "remainder of Taylor's series ~ t^{} (right: t^2, wrong: t^1); factors known to 0.2 %; 123 evaluations"


def test_the_first_and_the_last_line():
    assert text("right") == ["right: no input's gradient is off by more than 1.5 %", LAST.format("1.0")]
    assert text("wrong", rate=(2.0, 1.2), problems=("a", "b")) == ["wrong", "a", "b", LAST.format("1.2")]
    hidden = "errors below {} % of an input's slope are hidden by noise, and 2.0 % should be visible"
    more = "Give a larger budget or tolerance"
    for visible, why in [
        (0.015, "the slopes of some inputs are hidden by noise"),
        (0.375, hidden.format("37.5")),
        (9.99, hidden.format("999.0")),
        (10.0, "even large errors are hidden by noise"),
    ]:
        assert text("undecided", visible=(0.01, visible))[0] == f"undecided: {why}. {more}"


def test_all_errors_are_in_one_unit():
    """A weak input's `visible` is in another one: it is said of that input, and is not part of the headline."""
    lines = text("undecided", factor=(1.0, NAN), visible=(0.05, 3.75))
    assert "5.0 % of an input's slope" in lines[0]
    weak = "input 1: its slope is too weak to be judged"
    assert lines[1] == f"{weak}; an error of 3.8 % of the typical slope would be visible"
    assert text("right", factor=(1.0, NAN), visible=(0.01, 3.75))[0].endswith("by more than 1.0 %")
    assert text("right", factor=(NAN, NAN), visible=(0.01, 0.01))[0] == "right"
    assert text("undecided", factor=(1.0, NAN), visible=(0.05, 1e30))[1].endswith("too weak to be judged")


ALL = torch.ones(2, 1, dtype=torch.bool)
STAIRS = Staircase(ALL, ~ALL, torch.tensor([0.1, 0.4]), False)
JUMPS = torch.zeros(16, 2, dtype=torch.bool)
JUMPS[3, 1] = True


@pytest.mark.parametrize(
    ("obstacle", "visible", "words"),
    [
        (Obstacle(unconfirmed=True), 0.01, "an error was seen, but not again with steps a quarter as long. Give a lar"),
        (Obstacle(late=True), 0.05, "should be visible. Give more seconds, or a larger tolerance"),
        (Obstacle("roughness of the outputs"), 0.05, "are hidden by roughness of the outputs, and"),
        (Obstacle(staircase=STAIRS), 0.05, "the box has no slope that a gradient could be compared with"),
        (Obstacle(staircase=STAIRS._replace(regular=True)), 0.05, "Give a larger tolerance"),
        (
            Obstacle(at_jump=JUMPS),
            math.inf,
            "the box jumps along input 1, so that a gradient",
        ),
        (Obstacle(late=True), math.inf, "no slopes are known yet, and the time is over. Give more seconds"),
    ],
)
def test_why_a_check_is_undecided(obstacle, visible, words):
    assert words in text("undecided", visible=(visible, visible), obstacle=obstacle)[0]


def test_a_box_without_slopes_has_no_precision():
    lines = text("undecided", notes=("steps",), obstacle=Obstacle(staircase=STAIRS))
    assert lines[1:] == ["steps", "123 evaluations"]


# ---- notes


def noted(verdict, obstacle, factor=(1.0, 1.0), wrong=(), scale=0.3):
    scale = torch.as_tensor(scale).double().expand(2)
    return notes(verdict, evidence(factor, wrong=wrong), obstacle, scale)


def test_advice_on_steps():
    (piecewise,) = noted("undecided", Obstacle(staircase=STAIRS))
    assert piecewise.startswith("the box is piecewise constant, with flat parts about 0.2 of an input's spread long: ")
    assert piecewise.endswith("policy=bondgrad.policies.Fixed(0.3)")
    assert noted("right", Obstacle(staircase=STAIRS._replace(regular=True))) == ()
    (rounded,) = noted("undecided", Obstacle(staircase=STAIRS._replace(regular=True)))
    assert rounded.startswith(
        "the outputs are rounded, with flat parts about 0.2 of an input's spread long: a gradient"
    )
    assert "judged" not in rounded
    (jumps,) = noted("wrong", Obstacle(at_jump=JUMPS, jump_error=5.0))
    assert jumps.startswith("the box has jumps near 1 of 16 rows (input 1)")
    assert jumps.endswith("Fixed(0.3)")
    (small,) = noted("right", Obstacle(at_jump=JUMPS, jump_error=0.02))
    assert "Make the box more exact" in small
    (unlike,) = noted("undecided", Obstacle(staircase=STAIRS), scale=[0.1, 10.0])
    assert "Scale the inputs to the same spread" in unlike


def test_where_a_box_is_piecewise_constant():
    coarse = torch.tensor([[False, True], [False, False]])
    stairs = Staircase(coarse, ~coarse, torch.tensor([0.025, NAN]), False)
    (some,) = noted("undecided", Obstacle(staircase=stairs), scale=[40.0, 1.0])
    assert some.startswith(
        "the box is piecewise constant along input 0, with flat parts about 1 long in output 1 only: a gradient "
        "depends on the step, and was not judged. Train with steps there about as long as the input varies, 40: the "
    )
    jumps = torch.ones(16, 1, dtype=torch.bool) & stairs.without_slope
    assert noted("undecided", Obstacle(staircase=stairs, at_jump=jumps), scale=[40.0, 1.0]) == (some,)
    jumps[3, 1] = True
    _, more = noted("undecided", Obstacle(staircase=stairs, at_jump=jumps), scale=[40.0, 1.0])
    assert more.startswith("the box has jumps near 1 of 16 rows (input 1)")


def test_levels_of_rounded_outputs_are_not_called_jumps_once_more():
    coarse = torch.tensor([[True, True], [False, False]])
    stairs = Staircase(coarse, ~coarse, torch.tensor([0.025, NAN]), True)
    jumps = torch.zeros(16, 2, dtype=torch.bool)
    jumps[:, 0] = True
    (rounded,) = noted("undecided", Obstacle(staircase=stairs, at_jump=jumps))
    assert rounded.startswith("the outputs are rounded along input 0")
    jumps[3, 1] = True
    _, more = noted("undecided", Obstacle(staircase=stairs, at_jump=jumps))
    assert more.startswith("the box has jumps near 1 of 16 rows (input 1)")


def test_noise_makes_a_layer_step_far():
    noisy = Obstacle(noisy_layer=True)
    (note,) = noted("wrong", noisy, factor=(1.0, 0.9), wrong=[1])
    assert note.startswith("the outputs are noisy, so the layer takes long steps")
    assert noted("wrong", noisy, factor=(1.0, -0.9), wrong=[1]) == ()  # a wrong sign is none of it
    assert noted("wrong", Obstacle(), factor=(1.0, 0.9), wrong=[1]) == ()
    assert noted("right", noisy) == ()


# ---- what is not known


def test_what_is_not_known_is_not_said():
    nothing = "remainder of Taylor's series ~ noise at every step t (right: t^2, wrong: t^1); "
    for verdict in ("right", "wrong"):
        assert text(verdict, rate=(NAN, NAN))[-1] == f"{nothing}factors known to 0.2 %; 123 evaluations"
        assert text(verdict, rate=(NAN, 2.0))[-1] == LAST.format("2.0")
    unseen = text("undecided", (NAN, NAN), visible=(math.inf, math.inf), rate=(NAN, NAN))
    assert unseen[1:] == ["123 evaluations"]
    assert "factors known to 1e-04 %" in text("right", factor=(1.0, NAN), error=(1e-6, math.inf))[-1]


@pytest.mark.parametrize(("count", "others"), [(8, ""), (9, " and others")])
def test_weak_inputs(count, others):
    lines = text("right", [1.0, *[NAN] * count], [0.01, *[0.5] * count], [2.0] * (count + 1), [1e-6] * (count + 1))
    first = f"inputs 1, 2, 3, 4, 5, 6, 7, 8{others}: their slopes are too weak to be judged; an error of 0.5 %"
    assert lines[1] == f"{first} of the typical slope would be visible"


@pytest.mark.parametrize(
    ("fraction", "words"), [(0.0, "0.0 %"), (1e-3, "0.1 %"), (9.9e-4, "1e-01 %"), (0.123, "12.3 %"), (2e-6, "2e-04 %")]
)
def test_percent(fraction, words):
    assert percent(fraction) == words
