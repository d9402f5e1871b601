"""The sentences in which a report says what was found."""

import pytest

from bondgrad.probing._influences import History, RowCoupling
from bondgrad.probing._inputs import Dependence, Failure, Sensitivity
from tests.probing.test_report import noisy, quiet, ranges, rounding


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (quiet(), "Asked again, it gives the same answers to the last bit."),
        (quiet(exact=False), "Asked again, it gives the same answers up to rounding."),
        (quiet(moving=True), "Asked again, its answers have no noise, but move on steadily."),
        (
            noisy(),
            "Random: 95 of 100 answers lie within ±3.5 (25 % of the spread, standard deviation 2 at most). No global "
            "random numbers were found behind it: a device, or a generator of its own.",
        ),
        (
            noisy(within_a_call=False, generator="python", modules=["randomised ReLU"], quiet_in_eval=True),
            "Random: 95 of 100 answers lie within ±3.5 (25 % of the spread, standard deviation 2 at most). All rows of "
            "a call share the same noise. It draws from Python's random module: reset that, and it repeats itself. In "
            "training mode: randomised ReLU. In eval mode, in which BlackBox keeps a module, it repeats itself.",
        ),
        (
            noisy(by_place=True),
            "Random: 95 of 100 answers lie within ±3.5 (25 % of the spread, standard deviation 2 at most). The same "
            "noise comes in every call, by place in the call: as if its seed were reset in each.",
        ),
        (
            noisy(by_place=True, takes_seed=True),
            "Random: 95 of 100 answers lie within ±3.5 (25 % of the spread, standard deviation 2 at most). The same "
            "noise comes in every call, by place in the call: as if its seed were reset in each. It takes a seed: two "
            "calls with the same one agree.",
        ),
        (rounding(), "Rounding is about 1e-07 of the answers: float32 inside."),
        (
            rounding(1e-4, "good to about 4 digits"),
            "Rounding is about 0.0001 of the answers: they are good to about 4 digits, by the tolerance of a solver, "
            "printed digits, or arithmetic in TF32 or float16.",
        ),
        (rounding(floor=0.0), "No rounding to be seen: float32."),
        (rounding(quantum=[0.01], largest=0.01), "Answers come in steps of 0.01 (rounded to decimals)."),
        (rounding(quantum=[0.02], largest=0.02), "Answers come in steps of 0.02 (quantised)."),
        (
            rounding(0.1, rough=True),
            "Rough: at close points answers differ by about 0.1 of their size, and not by steps.",
        ),
        (
            rounding(0.0, shortcut=1e-4, shortcut_change=0.2),
            "No rounding to be seen: float32. As things are set here (autocast, TF32), answers change by 0.2 and "
            "rounding is about 0.0001: TF32 or float16. BlackBox switches that off, unless full_precision=False.",
        ),
        (RowCoupling(False, 0.0), "Rows do not influence one another."),
        (
            RowCoupling(True, 0.5),
            "Rows influence one another: other rows in the call change an answer by 50 % of the spread. Differences "
            "between perturbed rows then mean little.",
        ),
        (History(None, 0.0, 2), "Whether it drifts was not looked at."),
        (History(False, 0.0, 3), "No drift over 3 looks at the same rows. No memory of earlier questions."),
        (
            History(True, 0.5, 7, True, 0.25),
            "It drifts: by 25 % of the spread over 7 looks at the same rows. Both ends of a central difference are "
            "asked next to each other, so slow drift does little harm. It remembers: the question before changes an "
            "answer by 50 % of the spread. Give it state=, or snapshot() and restore().",
        ),
        (ranges(), "It answered at 17 values of each input, over their whole range."),
        (
            ranges([Failure(3, 1.0, None, "NaN"), Failure(4, None, 0.0, "infinite")], 0.25, 0.7),
            "It fails at 25 % of the typical rows. Of 17 values tried of each input, it fails at those of input 3 "
            "above 1: NaN; input 4 below 0: infinite. Between them it was not tried. Saturated: over 70 % of the "
            "range its outputs hardly change.",
        ),
        (
            Sensitivity([1.0, 3.0, 2.0], []),
            "Moved by their spread, these change the outputs most (in spreads of theirs): 1 (3), 2 (2), 0 (1).",
        ),
        (
            Sensitivity([1.0, 3.0, 0.0, 2.0], [2]),
            "Moved by their spread, these change the outputs most (in spreads of "
            "theirs): 1 (3), 3 (2), 0 (1); least: 2 (0). Dead: input 2.",
        ),
        (
            Sensitivity([1.0], None),
            "Moved by their spread, these change the outputs most (in spreads of theirs): 0 (1). "
            "Too noisy or too coarse to say whether any is dead.",
        ),
        (Dependence(4, 4, 1.0, None, []), "No structure to be used: every input shares an output with every other."),
        (
            Dependence(1, 4, 0.25, (1, 2), []),
            "4 blocks of one input: 2 evaluations a row for a central gradient instead of 8.",
        ),
        (
            Dependence(2, 4, 0.5, (2, 2), []),
            "2 blocks of 2 inputs: 4 evaluations a row for a central gradient instead of 8.",
        ),
        (
            Dependence(3, 4, 0.5, None, []),
            "Outputs depend on 50 % of the inputs; 3 groups move together: 6 evaluations "
            "a row for a central gradient instead of 8.",
        ),
    ],
)
def test_words(finding, words):
    assert finding.words == words


def test_long_lists_are_cut():
    assert Sensitivity([0.0] * 13, list(range(12))).words.endswith("Dead: inputs 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11.")
    assert Sensitivity([0.0] * 13, list(range(13))).words.endswith("10, 11, ....")
    failures = [Failure(i, None, None, "NaN") for i in range(9)]
    assert ranges(failures[:8]).words.endswith("input 7 anywhere: NaN. Between them it was not tried.")
    assert ranges(failures).words.endswith("input 7 anywhere: NaN; .... Between them it was not tried.")


@pytest.mark.parametrize(
    ("low", "high", "where"),
    [(None, None, "anywhere"), (0.0, None, "above 0"), (None, -2.5, "below -2.5"), (0.12345, 2.0, "from 0.123 to 2")],
)
def test_where_it_fails(low, high, where):
    assert Failure(7, low, high, "NaN").words == f"input 7 {where}: NaN"
