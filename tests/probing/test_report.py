"""What a report says of findings: verdict, code, warnings, and the cost of training."""

import math
from dataclasses import replace

import pytest
import torch

from bondgrad import probe
from bondgrad.probing import Report
from bondgrad.probing._differences import Smoothness, StepLadder
from bondgrad.probing._influences import History, RowCoupling
from bondgrad.probing._inputs import Dependence, Failure, Ranges, Sensitivity
from bondgrad.probing._randomness import Randomness
from bondgrad.probing._recommendation import choose_noise
from bondgrad.probing._rounding import Rounding
from bondgrad.probing._speed import Speed

GIVEN = {
    "name": "fn",
    "in_features": 4,
    "out_features": 3,
    "dtype": "float32",
    "sample": "200 rows given",
    "limits": None,
    "flaky": 0,
    "left_out": [],
    "evaluator_given": False,
    "evaluations": 1234,
    "calls": 56,
    "seconds": 2.0,
}


def report(**found):
    return Report(**GIVEN | found)


def quiet(exact=True, moving=False, modules=()):
    return Randomness(True, exact, moving, [0.0], [0.0], [0.0], 0.0, True, False, list(modules))


def noisy(within_a_call=True, by_place=False, modules=(), **source):
    """Half-widths of 3 and 4: 3.5 in the root mean square."""
    return Randomness(
        False, False, False, [1.5, 2.0], [5.0, 5.0], [3.0, 4.0], 0.25, within_a_call, by_place, list(modules), **source
    )


def rounding(floor=1e-7, precision="float32", rough=False, quantum=(None,), half_width=0.0, largest=0.0, **shortcut):
    return Rounding(floor, precision, rough, "float32", list(quantum), half_width, largest, **shortcut)


def ranges(failures=(), failing_rows=0.0, flat=0.0):
    return Ranges(list(failures), failing_rows, flat, 4, [0, 1, 2, 3])


def steps(changes):
    return StepLadder([0.1, 1.0], [0.0], None, None, None, None, None, None, 1.0, changes)


# ---- the verdict


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ({}, "nothing could be found out"),
        ({"randomness": quiet()}, "deterministic"),
        ({"randomness": quiet(moving=True)}, ""),
        ({"randomness": noisy()}, "noisy device, half-width 4"),
        ({"randomness": noisy(takes_seed=True)}, "random, half-width 4, but takes a seed"),
        (
            {"randomness": noisy(generator="numpy")},
            "random: noise of half-width 4, drawn from numpy's global generator",
        ),
        ({"randomness": noisy(by_place=True)}, "the same noise in every call, by place in the call, half-width 4"),
        (
            {"randomness": noisy(by_place=True, takes_seed=True)},
            "the same noise in every call, by place in the call, half-width 4, though it takes a seed",
        ),
        (
            {"randomness": noisy(modules=["dropout (p = 0.5)", "batch normalisation"], generator="torch")},
            "random: dropout (p = 0.5) in training mode, drawn from torch's generator",
        ),
        ({"randomness": noisy(modules=["dropout (p = 0.5)"])}, "noisy device, half-width 4"),
        ({"company": RowCoupling(True, 0.1)}, "rows influence one another (something goes over the whole batch)"),
        ({"company": RowCoupling(False, 0.0), "flaky": 1}, "fails at random"),
        (
            {"company": RowCoupling(True, 0.1), "randomness": quiet(modules=["2 layers of batch normalisation"])},
            "rows influence one another (batch normalisation in training mode), deterministic",
        ),
        ({"history": History(True, 0.1, 5, True, 0.1)}, "drifts, remembers earlier questions"),
        ({"history": History(False, 0.0, 5, False)}, ""),
        ({"rounding": rounding()}, "float32"),
        ({"rounding": rounding(), "randomness": noisy()}, "noisy device, half-width 4"),
        ({"rounding": rounding(), "smoothness": Smoothness("kinks", 1.0, 0.0)}, "with kinks, float32"),
        ({"rounding": rounding(shortcut=1e-3)}, "float32, but bfloat16 as set here"),
        ({"rounding": rounding(rough=True), "smoothness": Smoothness("jumps", 0.0, 1.0)}, "rough, float32"),
        (
            {
                "rounding": rounding(quantum=[0.25, None, 0.5], largest=0.5),
                "smoothness": Smoothness("jumps", 0.0, 1.0),
            },
            "quantised in steps of 0.5",
        ),
        ({"rounding": rounding(quantum=[0.25, None], largest=0.25)}, "float32"),  # most outputs must be
        ({"smoothness": Smoothness("unclear", None, 0.0), "flaky": 2}, "fails at random"),
        ({"steps": steps(False), "ranges": ranges(flat=0.7)}, "constant"),
        ({"steps": steps(True), "ranges": ranges(flat=0.7)}, "saturated"),
        ({"ranges": ranges(flat=0.6)}, ""),
        ({"ranges": ranges(failing_rows=0.1)}, "fails in places"),
        ({"ranges": ranges([Failure(0, None, None, "NaN")])}, "fails in places"),
        ({"speed": Speed(1e-3, {1: 1e-3, 8: 8e-3}, None)}, "takes 1.0 ms a row, not vectorised"),
        ({"speed": Speed(1e-3, {1: 1e-3, 8: 1e-3}, None)}, "takes 1.0 ms a call, vectorised"),
        ({"speed": Speed(9e-4, {1: 9e-4}, 1)}, "one row at a time"),
    ],
)
def test_verdict(found, verdict):
    assert report(**found).verdict == (verdict or "nothing could be found out")


# ---- all of it, as text and as JSON


def test_all_of_it():
    text = str(report(speed=Speed(2.0, {1: 2.0}, None), flaky=1, left_out=["Steps: no time"]))
    assert text.splitlines() == [
        "fn: fails at random, takes 2.0 s a row",
        "",
        "4 inputs (float32) to 3 outputs, 200 rows given; 1,234 evaluations in 56 calls, 2.0 s.",
        "",
        "Speed: One row takes 2.0 s.",
        "Left out: Steps: no time",
        "",
        "import bondgrad",
        "",
        "box = bondgrad.BlackBox(",
        "    fn,",
        "    in_features=4,  # the width of its rows",
        "    out_features=3,  # the width of its answers",
        ")",
        "",
        "Mind: It fails at random: 1 times in 56 calls, and not when asked again. In training such rows are asked "
        "again: see retries= of evaluators.",
        "Cost of 1,000 steps of 64 rows: central 596 evaluations a step, 14 days in all (extrapolated); forward 330 "
        "evaluations a step, 7.6 days in all (extrapolated); simultaneous 197 evaluations a step, 4.6 days in all "
        "(extrapolated)",
    ]


def test_what_is_not_finite_is_none_in_json():
    found = report(limits=([-math.inf], [math.nan]), speed=Speed(1.0, {1: 1.0}, None)).as_dict(batch=2, steps=3)
    assert found["limits"] == [[None], [None]]
    assert found["speed"]["batches"] == {"1": 1.0}
    assert (found["cost"]["batch"], found["cost"]["steps"]) == (2, 3)


# ---- arguments, and what they cannot set right


@pytest.mark.parametrize(
    ("found", "arguments"),
    [
        ({"out_features": 0}, {}),
        ({"limits": ([0.0, 0.0], [1.0, math.inf])}, {"limits": '(0.0, [1.0, float("inf")])'}),
        ({"dependence": Dependence(4, 4, 1.0, None, [])}, {}),
        ({"dependence": Dependence(2, 4, 0.5, (2, 3), [])}, {"structure": "bondgrad.structure.Blocks(2, 3)"}),
        ({"dependence": Dependence(3, 4, 0.5, None, [])}, {"structure": '"auto"'}),
        (
            {"dependence": Dependence(3, 4, 0.5, None, []), "randomness": noisy()},
            {"structure": '"auto"', "noise": "3.5"},
        ),
        (
            {"dependence": Dependence(2, 4, 0.5, (2, 3), []), "randomness": noisy()},
            {"structure": "bondgrad.structure.Blocks(2, 3)"},
        ),
        ({"speed": Speed(1.0, {1: 1.0}, None)}, {}),
        ({"speed": Speed(1.0, {1: 1.0}, 1)}, {"evaluator": "bondgrad.evaluators.Local(max_rows=1)"}),
        ({"speed": Speed(1.0, {1: 1.0}, 7), "evaluator_given": True}, {"evaluator": "evaluator"}),
    ],
)
def test_arguments(found, arguments):
    made = report(**found)
    width = {"out_features": "3"} if made.out_features else {}
    expected = {"in_features": "4"} | width | arguments
    assert list(made.reasons) == list(expected)
    for name, value in expected.items():
        assert f"    {name}={value}," in made.code
        assert made.reasons[name].split()[0] in made.code
    compile(made.code, "pasted", "exec")
    assert max(map(len, made.code.splitlines())) <= 80


def test_reasons():
    assert report(speed=Speed(1.0, {1: 1.0}, 1)).reasons["evaluator"] == "it takes one row at a time"
    given = report(speed=Speed(1.0, {1: 1.0}, 7), evaluator_given=True).reasons["evaluator"]
    assert given == "put here the one that was given to probe, with max_rows=7: it refuses calls with many more rows"
    assert report(evaluator_given=True).reasons["evaluator"] == "put here the one that was given to probe"
    saving = report(dependence=Dependence(3, 2000, 0.5, None, [])).reasons["structure"]
    assert saving == "6 evaluations a row instead of 4,000"


@pytest.mark.parametrize(
    ("found", "noise"),
    [
        ({}, None),
        ({"randomness": quiet()}, None),
        ({"randomness": noisy()}, ("3.5", "measured: 95 of 100 answers lie within it")),
        ({"randomness": noisy(quiet_in_eval=True)}, None),
        ({"rounding": rounding()}, None),
        (
            {"rounding": rounding(precision="bfloat16", half_width=0.125)},
            ("0.12", "it computes in bfloat16, coarser than the float32 that it returns"),
        ),
        ({"rounding": rounding(rough=True, half_width=0.5)}, ("0.5", "the measured roughness of its answers")),
        ({"rounding": rounding(half_width=0.5, largest=1.0)}, ("0.5", "half a step of its quantised answers")),
        (
            {"randomness": noisy(), "rounding": rounding(half_width=0.5)},
            ("3.5", "measured: 95 of 100 answers lie within it"),
        ),
    ],
)
def test_noise(found, noise):
    assert choose_noise(report(**found)) == noise


@pytest.mark.parametrize(
    ("found", "warned"),
    [
        ({}, ""),
        ({"flaky": 3}, "3 times in 56 calls"),
        ({"randomness": quiet(modules=["a", "b"])}, "so a and b will not be"),
        ({"company": RowCoupling(True, 1.0)}, "they will mix"),
        ({"company": RowCoupling(False, 0.0)}, ""),
        ({"company": RowCoupling(True, 1.0), "randomness": quiet(modules=["a"])}, "so a will not be"),
        ({"randomness": noisy()}, ""),
        ({"randomness": noisy(generator="torch")}, "parameter `seed`"),
        ({"randomness": noisy(by_place=True)}, "parameter `seed`"),
        ({"randomness": noisy(generator="torch", quiet_in_eval=True)}, ""),
        ({"randomness": noisy(by_place=True, takes_seed=True)}, ""),
        ({"history": History(True, 0.1)}, "give it a state"),
        ({"history": History(False, 0.0)}, ""),
        ({"sensitivity": Sensitivity([0.0] * 4, [1, 2])}, "2 inputs move nothing"),
        ({"sensitivity": Sensitivity([0.0] * 4, [0, 1, 2, 3])}, ""),
        ({"sensitivity": Sensitivity([0.0] * 4, None)}, ""),
        ({"sensitivity": Sensitivity([0.0] * 4, [])}, ""),
    ],
)
def test_warnings(found, warned):
    warnings = report(**found).warnings
    assert len(warnings) == bool(warned)
    assert warned in " ".join(warnings)


# ---- cost


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"steps": replace(steps(True), constant=True)}, True),
        ({"smoothness": Smoothness("jumps", 0.0, 0.1)}, True),
        ({"smoothness": Smoothness("poles", -1.0, 0.0)}, False),
        ({"steps": steps(True)}, False),
    ],
)
def test_a_resolution_may_be_behind_jumps(found, named):
    assert any(text.endswith("as resolution=.") for text in report(**found).warnings) == named


def test_cost_of_a_box_that_takes_a_second_a_row():
    """Of 100 steps of 10 rows; 4 of 100 evaluations go into trials, of 16 rows or of all."""
    costs = report(speed=Speed(1.0, {1: 1.0, 8: 8.0}, None)).cost(batch=10, steps=100)
    assert [costs[name].evaluations for name in ("central", "forward", "simultaneous")] == [93, 52, 31]
    seconds = [10 * (1 + 1.04 * moved) for moved in (8, 4, 2)]
    assert [costs[name].seconds for name in ("central", "forward", "simultaneous")] == pytest.approx(seconds)
    assert costs["central"].hours == pytest.approx(100 * seconds[0] / 3600)
    assert costs["central"].extrapolated


def test_cost_by_groups_and_without_speed():
    costs = report(dependence=Dependence(2, 4, 0.5, (2, 2), [])).cost(batch=100)
    assert [costs[name].evaluations for name in ("central", "forward", "simultaneous")] == [516, 308, 308]
    assert (costs["central"].seconds, costs["central"].hours, costs["central"].extrapolated) == (None, None, False)


def test_one_input_is_one_input():
    report = probe(lambda x: x.sum(1, keepdim=True), torch.randn(20, 1), budget=200)
    assert "1 input (float32) to 1 output, 20 rows given" in str(report)
