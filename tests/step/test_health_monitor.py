"""When a layer says that something is wrong with its box, by the reports of its trials."""

import warnings

import pytest

from bondgrad.step._health import HealthMonitor, HealthReport

WELL = HealthReport(alike=True, noise=0.0, rough=1e-8, signal=50.0, drowned=0.01, dead=False, rows=4)
NOISY = WELL._replace(alike=False, noise=0.1)


def said(reports):
    """The number of reports after which each warning came, and a word of it."""
    monitor, found = HealthMonitor(), []
    words = ["same answers", "grew", "do not change at all", "no signal", "jumps", "too rough or coarse", "too large"]
    words.append("one step for each input does not suit all rows")
    for i, report in enumerate(reports):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            monitor.watch(report)
        found += [(i + 1, word) for warning in caught for word in words if word in str(warning.message)]
        assert monitor.last is report
    return found


def test_nothing_is_said_of_a_box_that_does_well():
    assert said([WELL] * 20) == []
    assert said([NOISY] * 20) == []


def test_answers_that_differ_are_news_after_four_trials_that_were_alike():
    assert said([WELL] * 4 + [NOISY] * 3) == [(5, "same answers")]
    assert said([WELL] * 3 + [NOISY] * 3) == []
    assert said([NOISY] + [WELL] * 4 + [NOISY] * 3) == []


@pytest.mark.parametrize(("factor", "news"), [(4.01, [(8, "grew")]), (4.0, []), (3.9, [])])
def test_noise_has_grown_when_four_trials_in_a_row_have_four_times_the_most_of_the_first_four(factor, news):
    quiet = NOISY._replace(noise=0.05)
    grown = NOISY._replace(noise=0.1 * factor)
    assert said([quiet, NOISY, quiet, quiet] + [grown] * 5) == news
    assert said([quiet, NOISY, quiet, quiet] + [grown, grown, grown, NOISY] * 3) == []


@pytest.mark.parametrize(
    ("jumps", "named"),
    [
        ((3,), "input 3"),
        ((0, 2), "inputs 0, 2"),
        (range(5), "inputs 0, 1, 2, 3, 4"),
        (range(30), "inputs 0, 1, 2, 3 and 26 more"),
    ],
)
def test_inputs_along_which_a_box_jumps_are_named(jumps, named):
    monitor, report = HealthMonitor(), WELL._replace(jumps=tuple(jumps))
    for _ in range(3):
        monitor.watch(report)
    with pytest.warns(UserWarning, match=rf"on the scale on which its inputs vary \({named}\): short steps"):
        monitor.watch(report)


def test_a_box_that_does_not_move_is_named_after_four_trials():
    dead = WELL._replace(dead=True, signal=0.0, drowned=5.0)
    assert said([dead] * 9) == [(4, "do not change at all")]
    assert said([dead, dead, dead, WELL] * 3) == []


def test_a_box_that_jumps_is_named_after_four_trials_and_nothing_is_said_of_its_noise():
    jumps = NOISY._replace(jumps=(0, 1), signal=0.0, drowned=5.0)
    assert said([jumps] * 20) == [(4, "jumps")]
    assert said([jumps, jumps, jumps, NOISY] * 5) == []
    dead = jumps._replace(dead=True)
    assert said([dead] * 20) == [(4, "do not change at all")]
    both = [dead, dead, jumps._replace(dead=False, jumps=()), jumps] * 5
    assert said(both) == []  # neither of the two for four trials in a row


@pytest.mark.parametrize(
    ("signal", "drowned", "news"),
    [
        (1.49, 1.0, [(17, "no signal")]),
        (1.51, 1.0, [(17, "too large")]),
        (1.49, 0.11, [(17, "no signal")]),
        (1.49, 0.09, []),
    ],
)
def test_there_is_no_signal_where_slopes_do_not_agree_and_a_tenth_of_them_is_noise(signal, drowned, news):
    """Four trials in a row count as one: three deviations in their sum, divided by the root of four."""
    report = NOISY._replace(signal=signal, drowned=drowned)
    assert said([report] * 20) == news
    assert said([report, report, report, NOISY] * 5) == []
    for other in (report._replace(dead=True), report._replace(jumps=(0, 1))):
        assert said([report, report, report, other] * 5) == []


def test_signals_of_four_trials_in_a_row_add_up():
    silent = NOISY._replace(signal=1.0, drowned=2.0)
    assert said([silent] * 13 + [silent._replace(signal=2.99), silent, silent, silent]) == [(17, "no signal")]
    assert said([silent] * 13 + [silent._replace(signal=3.01), silent, silent, silent]) == [(17, "too large")]


@pytest.mark.parametrize(("rows", "trial"), [(1, 65), (4, 17), (15, 5), (16, 5), (17, 4), (22, 4), (64, 4)])
def test_steps_have_settled_after_trials_at_sixty_four_rows(rows, trial):
    """But four trials in a row are needed in any case."""
    coarse = WELL._replace(drowned=0.2, rows=rows)
    assert said([coarse] * (trial - 1)) == []
    assert said([coarse] * 70) == [(trial, "too rough or coarse")]


def test_weakness_is_not_judged_before_steps_have_settled():
    silent, coarse = NOISY._replace(signal=0.0, drowned=2.0), WELL._replace(drowned=0.2)
    for report, word in ((silent, "no signal"), (coarse, "too rough or coarse")):
        assert said([report] * 16) == []
        assert said([report] * 16 + [WELL] * 20) == []
        well = WELL._replace(alike=report.alike)
        assert said([well] * 13 + [report] * 4) == [(17, word)]
        assert said([well] * 14 + [report] * 9) == [(18, word)]


@pytest.mark.parametrize(("drowned", "warns"), [(0.11, True), (0.09, False)])
@pytest.mark.parametrize(("alike", "word"), [(True, "too rough or coarse"), (False, "too large")])
def test_signs_are_wrong_where_a_tenth_of_the_slopes_square_is_noise(drowned, warns, alike, word):
    report = NOISY._replace(alike=alike, noise=0.0 if alike else 0.1, drowned=drowned)
    assert said([report] * 20) == ([(17, word)] if warns else [])
    assert said([report, report, report, NOISY] * 5) == []


def test_where_there_is_no_signal_nothing_is_said_of_signs():
    silent = NOISY._replace(signal=0.0, drowned=2.0)
    loud = silent._replace(signal=10.0)
    assert said([silent] * 17 + [loud] * 9) == [(17, "no signal")]
    assert said([loud] * 17 + [silent] * 9) == [(17, "too large"), (21, "no signal")]  # four trials in a row


UNEVEN = "one step for each input does not suit all rows"


@pytest.mark.parametrize(
    ("change", "news"),
    [
        ({}, [(17, UNEVEN)]),
        ({"hidden": 0.2}, []),
        ({"uneven": False}, []),
        ({"drowned": 0.09}, [(17, UNEVEN)]),
        ({"drowned": 0.11}, [(17, "too large")]),
        ({"drowned": 0.11, "signal": 0.0}, [(17, "no signal")]),
        ({"signal": 0.0}, [(17, UNEVEN)]),
        ({"jumps": (0, 1)}, [(4, "jumps")]),
        ({"dead": True}, [(4, "do not change at all")]),
    ],
)
def test_rows_are_uneven_where_a_fifth_of_the_slopes_is_hidden_and_others_are_far_larger(change, news):
    report = NOISY._replace(uneven=True, hidden=0.21)._replace(**change)
    assert said([report] * 20) == news
    assert said([report, report, report, NOISY] * 5) == []


def test_how_much_is_hidden_is_told_in_words():
    monitor = HealthMonitor()
    report = NOISY._replace(uneven=True, hidden=0.339)
    for _ in range(16):
        monitor.watch(report)
    with pytest.warns(UserWarning, match=r"noise on the outputs \(0.1\) hides 34 % of the slopes"):
        monitor.watch(report)


def test_the_first_four_trials_and_the_last_few_are_what_is_remembered():
    monitor = HealthMonitor()
    for _ in range(20):
        monitor.watch(WELL)
    assert len(vars(monitor)["_seen"]) == 7
