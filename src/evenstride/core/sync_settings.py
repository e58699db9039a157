"""The settings of synchronisation modes: what each may be, and how a refusal says so."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from math import inf
from numbers import Integral, Real
from typing import Any, ClassVar

from evenstride.errors import ConfigError

RATES = ("constant", "staleness")
"""How the step size of an update may follow its staleness, see `rate_factor`."""


@dataclass(frozen=True, slots=True)
class Range:
    """What a setting may be.

    Args:
        kind: ``int``, ``float``, or ``str`` for a word of ``RATES``.
        least: of a number.
        below: a number is less than this.
        above: whether a number must be more than ``least``.
    """

    kind: type[Any]
    least: float = 0
    below: float = inf
    above: bool = False

    def __str__(self) -> str:
        if self.kind is str:
            return " or ".join(RATES)
        what = "a whole number" if self.kind is int else "a finite number"
        least = f"{'above' if self.above else 'at least'} {self.least}"
        return f"{what}, {least}" + (f" and below {self.below}" if self.below < inf else "")

    def has(self, value: object) -> bool:
        """Return whether a value is one of these."""
        if self.kind is str:
            return value in RATES
        number = Integral if self.kind is int else Real
        if isinstance(value, bool) or not isinstance(value, number):
            return False
        number_is: Any = value
        enough = number_is > self.least if self.above else number_is >= self.least
        return bool(enough and number_is < self.below)  # neither is so of what is no number


RANGES = {
    "servers": Range(int, 1),
    "rate": Range(str),
    "staleness": Range(int, 0),
    "every": Range(int, 1),
    "after": Range(int, 0),
    "outer_rate": Range(float, 0, above=True),
    "outer_momentum": Range(float, 0, 1),
}


@dataclass(frozen=True, slots=True)
class Mode:
    """What all modes have."""

    name: ClassVar[str]
    lockstep: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value, allowed = getattr(self, field.name), RANGES[field.name]
            if not allowed.has(value):
                raise refused(type(self), field.name, repr(value))

    def __str__(self) -> str:
        told = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        changed = ",".join(f"{name}={value}" for name, value, default in told if value != default)
        return f"{self.name}({changed})" if changed else self.name

    @property
    def forgoes(self) -> tuple[str, ...]:
        """The promises that do not hold, a sentence each."""
        return ()


def settings_of(kind: type[Mode]) -> str:
    """Return the settings a mode has and what each may be, for people."""
    told = (f"{field.name} ({RANGES[field.name]})" for field in fields(kind))
    return ", ".join(told) or "none"


def example(kind: type[Mode]) -> str:
    """Return a text of this mode that is understood."""
    examples = {"local-sgd": "local-sgd(every=8)", "ssp": "ssp(staleness=3)"}
    return examples.get(kind.name, f"{kind.name}(servers=2)" if fields(kind) else kind.name)


def refused(kind: type[Mode], name: str, value: str) -> ConfigError:
    """Return the refusal of a setting's value, with its range and the way out."""
    default = next(field.default for field in fields(kind) if field.name == name)
    way_out = f"leave it out for {default}"
    if default is MISSING:
        way_out = f"write {example(kind)}, or bsp to bring the workers together in every step"
    return ConfigError(f"sync {kind.name}: {name} is {value}; it must be {RANGES[name]}; {way_out}")
