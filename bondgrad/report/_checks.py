"""One entry of a file, checked. The messages name the entry."""

import math
from collections.abc import Iterable
from typing import Any, Literal, overload


def mapping(raw: object, where: str = "the file") -> dict[str, Any]:
    """What must have keys."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where} must have keys and values, got {_short(raw)}")
    return raw


def entry(raw: dict[str, Any], key: str, where: str = "") -> Any:  # noqa: ANN401
    """What must be there."""
    if key not in raw:
        raise ValueError(f"{_name(key, where)} is missing")
    return raw[key]


def known(raw: dict[str, Any], names: Iterable[str], where: str) -> dict[str, Any]:
    """What has these names and no others."""
    if unknown := set(raw) - set(names):
        raise ValueError(f"{where}: nothing is called {', '.join(map(str, unknown))}; there are {', '.join(names)}")
    return raw


def items(raw: dict[str, Any], key: str, where: str = "") -> list[Any]:
    """A list. What is null or not there is an empty one."""
    found = raw.get(key)
    if found is not None and not isinstance(found, list):
        raise ValueError(f"{_name(key, where)} must be a list, got {_short(found)}")
    return found or []


def text(raw: dict[str, Any], key: str, where: str = "", needed: bool = True) -> str:
    """Some words, "" where there need not be any."""
    found = entry(raw, key, where) if needed else raw.get(key)
    if found is None and not needed:
        return ""
    if not isinstance(found, str):
        raise ValueError(f"{_name(key, where)} must be text, got {_short(found)}")
    return found.strip()


@overload
def count(raw: dict[str, Any], key: str, where: str = "", needed: Literal[True] = True) -> int: ...
@overload
def count(raw: dict[str, Any], key: str, where: str = "", *, needed: Literal[False]) -> int | None: ...
def count(raw: dict[str, Any], key: str, where: str = "", needed: bool = True) -> int | None:
    """A whole number."""
    found = entry(raw, key, where) if needed else raw.get(key)
    if found is None and not needed:
        return None
    if isinstance(found, bool) or not isinstance(found, int):
        raise ValueError(f"{_name(key, where)} must be a whole number, got {_short(found)}")
    return found


def number(found: object, where: str) -> float:
    """A finite number. YAML takes 1e-5, which has no point, for text: that is a number, too."""
    try:
        if isinstance(found, bool) or not isinstance(found, int | float | str):
            raise ValueError
        as_float = float(found)
        if not math.isfinite(as_float):
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(f"{where} must be a number, got {_short(found)}") from None
    return as_float


def value(found: object, where: str) -> tuple[float, float | None, float | None]:
    """A mean, its deviation over seeds, and its deviation over training steps; None is not given."""
    if isinstance(found, dict):
        parts = known(found, ("mean", "over_seeds", "over_steps"), where)
        mean = number(entry(parts, "mean", where), f"{where}.mean")
        seeds, steps = (parts.get(key) for key in ("over_seeds", "over_steps"))
        return mean, _number_or_none(seeds, where), _number_or_none(steps, where)
    both = found if isinstance(found, list) else [found]
    if len(both) not in (1, 2):
        raise ValueError(
            f"{where} must be a mean, [mean, deviation] or {{mean: ..., over_steps: ...}}, got {_short(found)}"
        )
    return number(both[0], where), _number_or_none(both[1] if len(both) == 2 else None, where), None


def columns_of(raw: dict[str, Any], key: str, by: str, where: str) -> dict[str, list[float]]:
    """Lists of one length, with nan for null. {} for null, and no list for one that is null."""
    if raw.get(key) is None:
        return {}
    name = _name(key, where)
    columns = mapping(raw[key], name)
    entry(columns, by, name)
    found = {
        column: [
            math.nan if part is None else number(part, f"{name}.{column}") for part in items(columns, column, name)
        ]
        for column, parts in columns.items()
        if parts is not None
    }
    lengths = {column: len(parts) for column, parts in found.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the lists of {name} must have one length, got {lengths}")
    return found


def _number_or_none(found: object, where: str) -> float | None:
    return None if found is None else number(found, where)


def _name(key: str, where: str) -> str:
    return f"{where}.{key}" if where else key


def _short(found: object) -> str:
    shown = repr(found)
    return shown if len(shown) <= 60 else shown[:57] + "..."
