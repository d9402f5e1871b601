"""When a layer says that something is wrong with its box, by the reports of its trials."""

import warnings

import pytest

from bondgrad.step._health import HealthMonitor, HealthReport

WELL = HealthReport(alike=True, noise=0.0, rough=1e-8, signal=50.0, drowned=0.01, at_limit=0.0, dead=False)
NOISY = WELL._replace(alike=False, noise=0.1)


def said(reports):
    """The number of reports after which each warning came, and a word of it."""
    monitor, found = HealthMonitor(), []
    words = ["same answers", "grew", "do not change at all", "no signal", "too coarse", "spoils many signs"]
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


def test_a_box_that_does_not_move_is_named_after_four_trials():
    dead = WELL._replace(dead=True, signal=0.0, drowned=5.0)
    assert said([dead] * 9) == [(4, "do not change at all")]
    assert said([dead, dead, dead, WELL] * 3) == []


@pytest.mark.parametrize(
    ("signal", "drowned", "news"),
    [(2.9, 1.1, [(4, "no signal")]), (3.0, 1.1, []), (2.9, 1.0, [])],
)
def test_there_is_no_signal_where_slopes_do_not_agree_and_are_mostly_noise(signal, drowned, news):
    report = NOISY._replace(signal=signal, drowned=drowned)
    assert said([report] * 9) == news
    assert said([report, report, report, NOISY] * 3) == []
    dead = report._replace(dead=True)
    assert said([report, report, report, dead] * 3) == []  # neither of the two for four trials in a row


@pytest.mark.parametrize(("drowned", "at_limit", "warns"), [(0.11, 0.5, True), (0.1, 0.5, False), (0.11, 0.49, False)])
@pytest.mark.parametrize(("alike", "word"), [(True, "too coarse"), (False, "spoils many signs")])
def test_signs_are_wrong_where_steps_cannot_grow_against_the_noise(drowned, at_limit, warns, alike, word):
    report = NOISY._replace(alike=alike, noise=0.0 if alike else 0.1, drowned=drowned, at_limit=at_limit)
    assert said([report] * 9) == ([(4, word)] if warns else [])


def test_where_there_is_no_signal_nothing_is_said_of_signs():
    silent = NOISY._replace(signal=0.0, drowned=2.0, at_limit=1.0)
    loud = silent._replace(signal=10.0)
    assert said([silent] * 4 + [loud] * 4) == [(4, "no signal")]


def test_the_first_four_trials_and_the_last_few_are_what_is_remembered():
    monitor = HealthMonitor()
    for _ in range(20):
        monitor.watch(WELL)
    assert len(vars(monitor)["_seen"]) == 7
