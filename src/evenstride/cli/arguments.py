"""Options that commands share, and readers of the numbers, lists and times given to them.

A reader raises `ConfigError`, or `typer.BadParameter` as Typer's parser, which says what to give.
An alias is an option that is the same in several commands; a function makes one whose help says
more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import nan
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from evenstride.core.spec import duration_s, numbers, split_specs
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.core.sync_modes.mode_specs import SyncMode

ValueT = TypeVar("ValueT")

_LARGEST = 10**9
# So that a seed which is taken for a number of seeds does not fill the memory.
MOST_SEEDS = 10_000
MOST_STEPS = 10_000_000  # of a simulation, and between two exchanges
MOST_LAG = 10_000  # steps from a measurement to its decision
_MOST_DIGITS = 18  # of a number; far longer ones, Python refuses to read


def seconds(text: str, option: str) -> float:
    """Return the seconds in a text such as ``90s``, ``6h`` or ``2d``; a number is hours."""
    found_s = duration_s(text, unit="h")
    if found_s:
        return found_s
    raise ConfigError(f"{option} is {text!r}; give a time above 0, such as 90s, 30m, 6h or 2d")


def wholes(text: str, option: str) -> tuple[int, ...]:
    """Return whole numbers above 0, separated by commas, ascending and each once."""
    found = tuple(sorted(set(numbers(text, int))))
    if not found or found[0] < 1 or found[-1] > _LARGEST:
        raise ConfigError(f"{option} is {text!r}; give whole numbers above 0, such as 256,512,1024")
    return found


def parts(text: str, option: str) -> tuple[float, ...]:
    """Return parts of one, as ``1/8`` or ``0.125``, separated by commas."""
    found = numbers(text, _fraction)
    if not found or not all(0 < part <= 1 for part in found):
        raise ConfigError(
            f"{option} is {text!r}; give parts of the script's batch above 0 and at most 1, such "
            "as 1/8,1/4,1/2,1"
        )
    return tuple(sorted(set(found)))


def _fraction(text: str) -> float:
    above, _, below = text.partition("/")
    return float(above) / (float(below or "1") or nan)


def names(text: str) -> tuple[str, ...]:
    """Return names separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def split_policies(texts: str | Iterable[str], option: str = "--policy") -> tuple[str, ...]:
    """Return the policies in comma-separated lists; the commas of ``static:1,2`` stay.

    >>> split_policies("uniform,static:20,100,adaptive")
    ('uniform', 'static:20,100', 'adaptive')
    """
    from evenstride.core.policies import POLICY_NAMES

    names = split_specs(texts, POLICY_NAMES)
    if not names:
        raise ConfigError(f"no policy to run; give some, such as {option} uniform,adaptive")
    if twice := _repeated(names):
        raise ConfigError(f"policy {twice[0]} is given twice; its figures would be the same")
    return names


def read_modes(text: str | None) -> tuple[SyncMode, ...]:
    """Return the modes of synchronisation in a list; none if there is no list."""
    from evenstride.core.sync_modes.mode_specs import SYNC_NAMES, sync_from_spec

    if text is None:
        return ()
    modes = tuple(map(sync_from_spec, split_specs(text, SYNC_NAMES)))
    if not modes:
        raise ConfigError("--sync names no mode; give some, such as bsp,ssp(staleness=3)")
    if twice := _repeated(modes):
        raise ConfigError(
            f"sync {twice[0]} is given twice; its figures would be the same; give one"
        )
    return modes


def _repeated(values: Sequence[ValueT]) -> list[ValueT]:
    """Return the values that stand further ahead as well."""
    return [value for index, value in enumerate(values) if value in values[:index]]


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

    >>> split_seeds("3"), split_seeds("4,7"), split_seeds("7,")
    ((0, 1, 2), (4, 7), (7,))
    """
    what = "a number of seeds, such as 20, or a list of them, such as 0,1,2 (7, for a single one)"
    seeds = _numbers(text, f"seeds {text!r} are not understood; give {what}")
    count = len(seeds) if "," in text else seeds[0]
    if count > MOST_SEEDS:
        one = "" if "," in text else f", or '{text.strip()},' for that single seed"
        raise ConfigError(f"{count} seeds are too many; give at most {MOST_SEEDS} of them{one}")
    if "," not in text:
        seeds = tuple(range(count))
    if not seeds:
        raise ConfigError(f"{text} seeds are none; give {what}")
    return _each_once(seeds, f"seeds {text}")


def split_lags(text: str | None) -> tuple[int, ...]:
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
    found = [number for number in map(_number, parts) if number is not None]
    if len(found) < len(parts):
        raise ConfigError(problem)
    return tuple(found)


def _each_once(values: Sequence[int], named: str) -> tuple[int, ...]:
    if len(set(values)) < len(values):
        raise ConfigError(f"{named} name one twice; give each once")
    return tuple(values)


POLICIES_HELP = (
    "Policies: adaptive, dbs, dynamic-batching, lb-bsp-cpu, lb-bsp-gpu, omnilearn, static "
    "(static:cores, static:flops, static:20,100), uniform. A setting follows a colon: "
    "dynamic-batching:window=5; an unknown one is answered with those there are."
)

Lag = Annotated[
    str | None,
    typer.Option(help="Steps from a measurement to its decision; each of a list is simulated."),
]
ColdLag = Annotated[
    int | None,
    typer.Option(
        help="The same for a fleet's first exchange, and while its policy opens.",
        metavar="N",
        parser=whole(1, MOST_LAG),
    ),
]
Every = Annotated[
    str | None,
    typer.Option(
        help="Steps between exchanges, or leader for the cadence that the leader sets.",
        metavar="N|leader",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object with a list of rows.")]


def policies_option(when: str) -> Any:
    """Return the option of the policies; its help opens with when and how they are given."""
    return typer.Option("--policy", "-p", help=f"{when} {POLICIES_HELP}", metavar="P[,Q...]")


def seeds_option(more: str = "") -> Any:
    what = "How many seeds (at most 10,000), or a list of them: 0,1,2, or 7, for one."
    return typer.Option(help=f"{what} {more}".rstrip())


def steps_option(more: str = "") -> Any:
    what = "Steps to simulate; later events do not happen."
    return typer.Option(help=f"{what} {more}".rstrip(), metavar="N", parser=whole(1, MOST_STEPS))
