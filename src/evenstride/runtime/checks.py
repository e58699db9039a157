"""Checks of single arguments, all with the same words."""

from __future__ import annotations

from evenstride.errors import ConfigError


def check_whole(name: str, value: object, least: int | None = None) -> None:
    """Raise unless a value is a whole number, and not below ``least``.

    Raises:
        ConfigError: names the argument, its value and what is possible.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (least is not None and isinstance(value, int) and value < least):
        range_of = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{name} is {value!r}; it must be a whole number{range_of}")
