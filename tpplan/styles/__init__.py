"""The styles: one file each, found by looking for them."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tpplan.language import styles as language
from tpplan.language.styles import Words
from tpplan.styles.style import Style, divisors, runs_as

_FILES = (import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__))
STYLES: dict[str, Style] = {
    thing.name: thing
    for file in _FILES
    for thing in vars(file).values()
    if isinstance(thing, Style)
}
NONE = Style()


def register(style: Style, words: Words) -> None:
    """Make a style of somebody else's known, to plans as well.

    Args:
        words: what it is, and the options that its rules may have.
    """
    STYLES[style.name] = style
    language.STYLES[style.name] = words


def named(style: str | None) -> Style:
    """A style by its name; of None what becomes of a module without a rule.

    Raises:
        KeyError: where no such style is known to this process.
    """
    if style is not None and style not in STYLES:
        raise KeyError(f"the style '{style}' is not registered in this process")
    return NONE if style is None else STYLES[style]


def for_parameters() -> list[str]:
    """The names of the styles that a bare parameter can have, for messages."""
    return [name for name, style in STYLES.items() if style.bare is not None]


__all__ = [
    "NONE",
    "STYLES",
    "Style",
    "divisors",
    "for_parameters",
    "named",
    "register",
    "runs_as",
]
