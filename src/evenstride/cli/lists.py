"""Numbers and lists as they are written on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import typer

from evenstride.errors import ConfigError

MOST_SEEDS = 10_000
"""So that a seed which is taken for a number of seeds does not fill the memory."""
MOST_STEPS, MOST_LAG = 10_000_000, 10_000
"""Of a simulation and between two exchanges, and from a measurement to its decision."""
_MOST_DIGITS = 18  # of a number; far longer ones, Python refuses to read


def split_policies(texts: str | Iterable[str], option: str = "--policy") -> tuple[str, ...]:
    """Return the policies in comma-separated lists; the commas of ``static:1,2`` stay.

    What follows a comma is part of the policy before it if that one has a colon and no policy
    is called so.

    Args:
        texts: the lists, or a single one.
        option: that they were given by.

    Raises:
        ConfigError: there is none, or one is given twice.

    >>> split_policies("uniform,static:20,100,adaptive")
    ('uniform', 'static:20,100', 'adaptive')
    """
    from evenstride.core.policies import POLICY_NAMES

    names: list[str] = []
    for text in [texts] if isinstance(texts, str) else texts:
        mine: list[str] = []
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            goes_on = mine and ":" in mine[-1] and part.partition(":")[0] not in POLICY_NAMES
            if goes_on:
                mine[-1] += f",{part}"
            else:
                mine.append(part)
        names += mine
    if not names:
        raise ConfigError(f"no policy to run; give some, such as {option} uniform,adaptive")
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise ConfigError(f"policy {twice} is given twice; its figures would be the same")
    return tuple(names)


def every_policy() -> tuple[str, ...]:
    """Return all policies there are, ours first, static by each resource."""
    from evenstride.core.policies import POLICY_NAMES

    others = [name for name in POLICY_NAMES if name not in ("adaptive", "static")]
    return ("adaptive", *others, "static:cores", "static:flops")


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of an option's whole number, which names its range where it refuses one."""

    def read(text: str) -> int:
        number = _number(text, least, most)
        if number is None:
            allowed = f"give a whole number from {least} to {most}"
            raise typer.BadParameter(f"{text!r} cannot be; {allowed}")
        return number

    return read


def read_every(text: str | None) -> int | str | None:
    """Return the steps between two exchanges, ``leader``, or nothing if nothing is given.

    Raises:
        ConfigError: it is something else, or out of range.

    >>> read_every("10"), read_every("leader")
    (10, 'leader')
    """
    if text is None or text == "leader":
        return text
    number = _number(text, 1, MOST_STEPS)
    if number is None:
        allowed = f"give steps from 1 to {MOST_STEPS}, such as 10, or leader"
        raise ConfigError(f"every {text!r} cannot be; {allowed}")
    return number


def split_seeds(text: str) -> tuple[int, ...]:
    """Return as many seeds as a number says, or those that a list names.

    Raises:
        ConfigError: it is not understood, is too many, or names a seed twice.

    >>> split_seeds("3"), split_seeds("4,7"), split_seeds("7,")
    ((0, 1, 2), (4, 7), (7,))
    """
    what = "a number of seeds, such as 20, or a list of them, such as 0,1,2 (7, for a single one)"
    numbers = _numbers(text, f"seeds {text!r} are not understood; give {what}")
    count = len(numbers) if "," in text else numbers[0]
    if count > MOST_SEEDS:
        one = "" if "," in text else f", or '{text.strip()},' for that single seed"
        raise ConfigError(f"{count} seeds are too many; give at most {MOST_SEEDS} of them{one}")
    if "," not in text:
        numbers = tuple(range(count))
    if not numbers:
        raise ConfigError(f"{text} seeds are none; give {what}")
    return _each_once(numbers, f"seeds {text}")


def split_lags(text: str | None) -> tuple[int, ...]:
    """Return the lags in a list.

    Raises:
        ConfigError: it is not understood, or one is out of range.
    """
    if text is None:
        return ()
    allowed = f"give steps from 1 to {MOST_LAG}, such as 1,3,8"
    lags = _numbers(text, f"lag {text!r} is not understood; {allowed}")
    wrong = [lag for lag in lags if not 1 <= lag <= MOST_LAG]
    if wrong:
        raise ConfigError(f"a lag of {wrong[0]} cannot be; {allowed}")
    return _each_once(lags, f"lags {text}")


def _number(text: str, least: int = 0, most: int = 10**_MOST_DIGITS) -> int | None:
    """Return the whole number that a text is, if it is one in the range."""
    plain = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if plain and least <= int(text) <= most else None


def _numbers(text: str, problem: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 1 and not parts[-1]:
        parts.pop()
    numbers = [number for number in map(_number, parts) if number is not None]
    if len(numbers) < len(parts):
        raise ConfigError(problem)
    return tuple(numbers)


def _each_once(numbers: Sequence[int], named: str) -> tuple[int, ...]:
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"{named} name one twice; give each once")
    return tuple(numbers)
