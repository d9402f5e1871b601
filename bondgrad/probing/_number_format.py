"""Numbers and sentences as they are printed in a report, and runs of flags."""

import itertools


def duration(seconds: float) -> str:
    """A time with two digits, in the largest unit of which it has at least one."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def percent(share: float) -> str:
    """A fraction in percent, with two digits, or as a whole number from 9.5 % on."""
    value = 100 * share
    return f"{value:,.0f} %" if value >= 9.5 else f"{value:.2g} %"


def applying(*texts: str | bool | None) -> list[str]:
    """Those of the texts that are not empty; each is given as `condition and text`, and left out if that is false."""
    return [text for text in texts if isinstance(text, str) and text]


def sentences(*texts: str | bool | None) -> str:
    """The texts that `applying` keeps, joined by spaces."""
    return " ".join(applying(*texts))


def runs(flags: list[bool]) -> list[tuple[int, int]]:
    """The first and the last index of every run of flags that are set."""
    groups = [list(run) for flag, run in itertools.groupby(range(len(flags)), flags.__getitem__) if flag]
    return [(run[0], run[-1]) for run in groups]
