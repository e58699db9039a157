"""Options that several commands share, and parsers of numbers, lists and times.

A parser raises `ConfigError`, or `typer.BadParameter` where Typer calls it.
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
# A seed given by mistake as the number of seeds must not fill the memory.
MOST_SEEDS = 10_000
MOST_STEPS = 10_000_000  # of a simulation, and between two exchanges
MOST_LAG = 10_000  # steps from a measurement to its decision
_MOST_DIGITS = 18  # of a number; Python refuses to parse far longer ones


def seconds(text: str, option: str) -> float:
    """Return the seconds in a text such as ``90s``, ``6h`` or ``2d``. The default unit is hours."""
    found_s = duration_s(text, unit="h")
    if found_s:
        return found_s
    raise ConfigError(f"{option} is {text!r}: expected a time above 0, such as 90s, 30m, 6h or 2d")


def wholes(text: str, option: str) -> tuple[int, ...]:
    """Return the distinct integers above 0 in a comma-separated list, in ascending order."""
    found = tuple(sorted(set(numbers(text, int))))
    if not found or found[0] < 1 or found[-1] > _LARGEST:
        raise ConfigError(f"{option} is {text!r}: expected integers above 0, such as 256,512,1024")
    return found


def parts(text: str, option: str) -> tuple[float, ...]:
    """Return the fractions in a comma-separated list, each as ``1/8`` or ``0.125``."""
    found = numbers(text, _fraction)
    if not found or not all(0 < part <= 1 for part in found):
        raise ConfigError(
            f"{option} is {text!r}: expected fractions of the script's batch, above 0 and at most "
            "1, such as 1/8,1/4,1/2,1"
        )
    return tuple(sorted(set(found)))


def _fraction(text: str) -> float:
    above, _, below = text.partition("/")
    return float(above) / (float(below or "1") or nan)


def names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def split_policies(texts: str | Iterable[str], option: str = "--policy") -> tuple[str, ...]:
    """Return the policies in comma-separated lists. ``static:1,2`` stays whole.

    >>> split_policies("uniform,static:20,100,adaptive")
    ('uniform', 'static:20,100', 'adaptive')
    """
    from evenstride.core.policies import POLICY_NAMES

    names = split_specs(texts, POLICY_NAMES)
    if not names:
        raise ConfigError(f"no policy given: expected a list, such as {option} uniform,adaptive")
    if twice := _repeated(names):
        raise ConfigError(f"policy {twice[0]} is given twice; give each policy once")
    return names


def read_modes(text: str | None) -> tuple[SyncMode, ...]:
    """Return the synchronisation modes in a list; an empty tuple without a list."""
    from evenstride.core.sync_modes.mode_specs import SYNC_NAMES, sync_from_spec

    if text is None:
        return ()
    modes = tuple(map(sync_from_spec, split_specs(text, SYNC_NAMES)))
    if not modes:
        raise ConfigError("--sync names no mode: expected a list, such as bsp,ssp(staleness=3)")
    if twice := _repeated(modes):
        raise ConfigError(f"sync {twice[0]} is given twice; give each mode once")
    return modes


def _repeated(values: Sequence[ValueT]) -> list[ValueT]:
    """Return the values that also occur earlier."""
    return [value for index, value in enumerate(values) if value in values[:index]]


def every_policy() -> tuple[str, ...]:
    """Return all policies: adaptive first, static by each resource last.

    `dynamic-batching` has a second row, with the window of its authors' own example.
    """
    from evenstride.core.policies import POLICY_NAMES

    others = [name for name in POLICY_NAMES if name not in ("adaptive", "static")]
    rest = sorted([*others, "dynamic-batching:window=10"])
    return ("adaptive", *rest, "static:cores", "static:flops")


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of an integer option with a range."""

    def read(text: str) -> int:
        number = _number(text, least, most)
        if number is None:
            raise typer.BadParameter(f"{text!r}: expected an integer from {least} to {most}")
        return number

    return read


def read_every(text: str | None) -> int | str | None:
    """Return the steps between two exchanges, ``leader``, or ``None`` without a text.

    >>> read_every("10"), read_every("leader")
    (10, 'leader')
    """
    if text is None or text == "leader":
        return text
    number = _number(text, 1, MOST_STEPS)
    if number is None:
        expected = f"expected steps from 1 to {MOST_STEPS}, such as 10, or leader"
        raise ConfigError(f"--every is {text!r}: {expected}")
    return number


def split_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds from 0 up to a number, or the seeds in a list.

    >>> split_seeds("3"), split_seeds("4,7"), split_seeds("7,")
    ((0, 1, 2), (4, 7), (7,))
    """
    what = "a number of seeds, such as 20, or a list, such as 0,1,2 (7, for the single seed 7)"
    seeds = _numbers(text, f"--seeds is {text!r}: expected {what}")
    count = len(seeds) if "," in text else seeds[0]
    if count > MOST_SEEDS:
        one = "" if "," in text else f", or '{text.strip()},' for that single seed"
        raise ConfigError(f"{count} seeds are too many: expected at most {MOST_SEEDS}{one}")
    if "," not in text:
        seeds = tuple(range(count))
    if not seeds:
        raise ConfigError(f"--seeds is {text!r}, which is no seed: expected {what}")
    return _each_once(seeds, f"--seeds {text}")


def split_lags(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    expected = f"expected steps from 1 to {MOST_LAG}, such as 1,3,8"
    lags = _numbers(text, f"--lag is {text!r}: {expected}")
    wrong = [lag for lag in lags if not 1 <= lag <= MOST_LAG]
    if wrong:
        raise ConfigError(f"--lag has {wrong[0]}: {expected}")
    return _each_once(lags, f"--lag {text}")


def _number(text: str, least: int = 0, most: int = 10**_MOST_DIGITS) -> int | None:
    """Return the integer in a text; ``None`` if it is none in the range."""
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
        raise ConfigError(f"{named} has a number twice; give each once")
    return tuple(values)


POLICIES_HELP = (
    "Policies: adaptive, dbs, dynamic-batching, lb-bsp-cpu, lb-bsp-gpu, omnilearn, static "
    "(static:cores, static:flops, static:20,100), uniform. my_module.MyPolicy imports your own. "
    "Settings follow a colon: dynamic-batching:window=5."
)
SCENARIOS_HELP = (
    "Scenario files, folders of them, or names of built-in scenarios (evenstride simulate --list)."
)

Lag = Annotated[
    str | None,
    typer.Option(help="Steps from a measurement to its decision. Each lag of a list is simulated."),
]
ColdLag = Annotated[
    int | None,
    typer.Option(
        help="Lag of the first exchange after the set of workers changes, and of the opening.",
        metavar="N",
        parser=whole(1, MOST_LAG),
    ),
]
Every = Annotated[
    str | None,
    typer.Option(
        help="Steps between exchanges, or leader for the interval that the leader chooses.",
        metavar="N|leader",
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Folder of stored profiles, from which a plan takes what its job did not measure, or "
        "off. Default: EVENSTRIDE_STORE, or evenstride in the user's cache folder.",
        metavar="FOLDER|off",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object with a list of rows.")]


def policies_option(when: str) -> Any:
    """Return the option ``--policy``; ``when`` is the beginning of its help."""
    return typer.Option("--policy", "-p", help=f"{when} {POLICIES_HELP}", metavar="P[,Q...]")


def seeds_option(more: str = "") -> Any:
    what = "Number of seeds (at most 10,000), or a list: 0,1,2 (7, for the single seed 7)."
    return typer.Option(help=f"{what} {more}".rstrip())


def steps_option(more: str = "") -> Any:
    what = "Steps to simulate. Later events do not happen."
    return typer.Option(help=f"{what} {more}".rstrip(), metavar="N", parser=whole(1, MOST_STEPS))
