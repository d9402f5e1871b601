"""Numbers and sentences of a report."""

import pytest

from bondgrad.probing._number_format import applying, duration, percent, runs, sentences


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2e-9, "2 ns"),
        (9.94e-6, "9.9 µs"),
        (1e-6, "1.0 µs"),
        (9.95e-6, "10 µs"),
        (1.5e-3, "1.5 ms"),
        (1.0, "1.0 s"),
        (60.0, "1.0 min"),
        (7200.0, "2.0 h"),
        (86400.0 * 12, "12 days"),
    ],
)
def test_durations_have_two_digits(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.5, "50 %"), (12.0, "1,200 %"), (0.095, "10 %"), (0.0945, "9.4 %"), (1e-4, "0.01 %")]
)
def test_shares_have_two_digits(share, text):
    assert percent(share) == text


def test_only_what_applies_is_said():
    assert applying("one", False, None, "", "two") == ["one", "two"]
    assert sentences("One.", False, "Two.") == "One. Two."


def test_runs():
    assert runs([True, True, False, True]) == [(0, 1), (3, 3)]
    assert runs([False, False]) == []
