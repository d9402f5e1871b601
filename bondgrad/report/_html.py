"""HTML that escapes all it is given, unless it was made here."""

from collections.abc import Iterable
from html import escape


class Html(str):
    """Markup. Any other text is escaped when it gets into markup."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str) -> Html:
    """An element with these children.

    Args:
        name: Of the element.
        children: Text, which is escaped, or markup.
        attributes: A trailing _ is dropped, any other becomes -.

    Example:
        >>> element("p", "a < b", class_="note")
        '<p class="note">a &lt; b</p>'
    """
    return Html(f"<{name}{_written(attributes)}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """One after the other."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def _written(attributes: dict[str, str]) -> str:
    names = {key: key.removesuffix("_").replace("_", "-") for key in attributes}
    return "".join(f' {names[key]}="{escape(value)}"' for key, value in attributes.items())
