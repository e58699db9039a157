"""Lengths of time and lists of numbers, as people write them."""

from __future__ import annotations

import re

from evenstride.errors import ConfigError

_LARGEST = 10**9
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str, option: str) -> float:
    """Return the seconds in a text such as ``90s``, ``30m``, ``6h`` or ``2d``; a number is hours.

    Raises:
        ConfigError: it is none, or not above 0.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text)
    if match and (match[2] in _UNITS or not match[2]) and float(match[1]) > 0:
        return float(match[1]) * _UNITS[match[2] or "h"]
    raise ConfigError(f"{option} is {text!r}; give a time above 0, such as 90s, 30m, 6h or 2d")


def wholes(text: str, option: str) -> tuple[int, ...]:
    """Return whole numbers above 0, separated by commas, ascending and each once.

    Raises:
        ConfigError: they are none.
    """
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 1 or found[-1] > _LARGEST:
        raise ConfigError(f"{option} is {text!r}; give whole numbers above 0, such as 256,512,1024")
    return found


def parts(text: str, option: str) -> tuple[float, ...]:
    """Return parts of one, as ``1/8`` or ``0.125``, separated by commas.

    Raises:
        ConfigError: they are none, or not above 0 and at most 1.
    """
    found = []
    for one in text.split(","):
        above, _, below = one.partition("/")
        try:
            found.append(float(above) / float(below or "1"))
        except (ValueError, ZeroDivisionError):
            found.append(0.0)
    if not all(0 < part <= 1 for part in found):
        raise ConfigError(
            f"{option} is {text!r}; give parts of the script's batch above 0 and at most 1, such "
            "as 1/8,1/4,1/2,1"
        )
    return tuple(sorted(set(found)))


def names(text: str) -> tuple[str, ...]:
    """Return names separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
