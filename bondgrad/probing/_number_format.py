"""Numbers and sentences as they are printed in a report, and runs of numbers."""

import itertools


def duration(seconds: float) -> str:
    """A time with two digits, in the unit that fits."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def percent(share: float) -> str:
    """A share with two digits, and without powers of ten where they are not needed."""
    value = 100 * share
    return f"{value:,.0f} %" if value >= 9.5 else f"{value:.2g} %"


def applying(*texts: str | bool | None) -> list[str]:
    """Those of the texts that apply: `condition and text` stands for each of them."""
    return [text for text in texts if isinstance(text, str) and text]


def sentences(*texts: str | bool | None) -> str:
    """Those of the sentences that apply, as one text."""
    return " ".join(applying(*texts))


def runs(flags: list[bool]) -> list[tuple[int, int]]:
    """The first and the last place of every run of flags that are set."""
    groups = [list(run) for flag, run in itertools.groupby(range(len(flags)), flags.__getitem__) if flag]
    return [(run[0], run[-1]) for run in groups]
