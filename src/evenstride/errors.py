"""Every exception evenstride raises on purpose.

EvenstrideError
├── ConfigError            what was asked cannot be; changing the request fixes it
│   ├── InfeasibleShares   no split of the global batch fits the workers' bounds
│   ├── UnknownPolicy      no policy has that name
│   ├── RanksDisagree      the ranks were given different settings
│   └── ScenarioError      a scenario file cannot be simulated
├── UsageError             the training loop breaks the contract of `Stride`
│   ├── LoaderBusy         two loops draw from one loader
│   ├── ScaleError         a batch was scaled twice, or not at all
│   └── StepInFlight       the state was asked for in the middle of a step
├── OutOfMemory            a batch does not fit, and its step cannot be repeated
├── WorkerLost             another rank is gone; this one cannot finish its step
├── SplitDiverged          a rank applied other shares than the leader decided
├── TraceError             a trace file cannot be read
├── LimitError             a CPU limit could not be set or kept
└── LaunchError            a local worker failed, or never answered

Each message has three parts: what was asked, what is possible, what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any


class EvenstrideError(Exception):
    """Base class: catch this to catch everything evenstride raises on purpose."""


class ConfigError(EvenstrideError, ValueError):
    """The request is impossible as written; changing it fixes it. Nothing was changed."""


class InfeasibleShares(ConfigError):
    """No split of the global batch fits inside the workers' bounds."""

    def __init__(
        self,
        total: int,
        at_least: int,
        at_most: int | None,
        workers: int,
        quanta: Sequence[int] = (1,),
        narrow: Sequence[int] | None = None,
    ) -> None:
        self.total, self.at_least, self.at_most, self.workers = total, at_least, at_most, workers
        self.quanta = tuple(quanta)
        self.narrow = None if narrow is None else tuple(narrow)
        multiples = " and ".join(map(str, self.quanta)) if len(self.quanta) <= 4 else "their quanta"
        if self.narrow is not None:
            rank, lower, upper, quantum = self.narrow
            super().__init__(
                f"cannot share a global batch of {total} samples in multiples of {multiples}: "
                f"worker {rank} takes {lower} to {upper} samples, and no multiple of {quantum} is "
                f"among them; raise the global batch (and its max_share, if it has one) to at "
                f"least {lower + -lower % quantum}, or choose a smaller multiple for it"
            )
            return
        fix = (
            f"raise the global batch to at least {at_least}, use fewer workers, or lower min_share"
            if total < at_least
            else f"lower the global batch to at most {at_most}, raise max_share, or add a worker"
        )
        possible = f"at least {at_least}" if at_most is None else f"{at_least} to {at_most}"
        if max(self.quanta) > 1:
            possible += f" in multiples of {multiples} (but for one worker's rest)"
            fix += ", or choose smaller multiples"
        super().__init__(
            f"cannot share a global batch of {total} samples: the {workers} workers together "
            f"accept {possible}; {fix}"
        )

    def __reduce__(self) -> tuple[type[InfeasibleShares], tuple[Any, ...]]:
        asked = (self.total, self.at_least, self.at_most, self.workers, self.quanta, self.narrow)
        return InfeasibleShares, asked


class UnknownPolicy(ConfigError):
    """No policy has that name; the message lists those there are."""

    def __init__(self, asked: str, known: Sequence[str]) -> None:
        self.asked, self.known = asked, tuple(known)
        near = get_close_matches(asked.partition(":")[0], known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        super().__init__(
            f"unknown policy {asked!r}{hint}; the policies are {', '.join(known)} "
            "(a fixed split is written static:20,100)"
        )

    def __reduce__(self) -> tuple[type[UnknownPolicy], tuple[str, tuple[str, ...]]]:
        return UnknownPolicy, (self.asked, self.known)


class RanksDisagree(ConfigError):
    """The ranks were given different settings, so they would train different things."""


class ScenarioError(ConfigError):
    """A scenario file cannot be simulated; the message names file, line, field and range."""


class UsageError(EvenstrideError, RuntimeError):
    """The training loop breaks the contract of `Stride`; the message names the line to change."""


class LoaderBusy(UsageError):
    """Two loops draw from one training loader at once."""


class ScaleError(UsageError):
    """A batch's loss was scaled twice, or its step went by without any scaled backward pass."""


class StepInFlight(UsageError):
    """The state was asked for between a step's backward pass and its optimizer step."""


class OutOfMemory(EvenstrideError, RuntimeError):
    """A batch does not fit into memory, and the step cannot be repeated in smaller ones."""


class WorkerLost(EvenstrideError, RuntimeError):
    """Another rank is gone, so the step in progress can never be finished."""


class SplitDiverged(EvenstrideError, RuntimeError):
    """A rank applied other shares, or stands at other data, than the leader."""


class TraceError(EvenstrideError, ValueError):
    """A trace file cannot be read; the message names the file and the line."""


class LimitError(EvenstrideError, OSError):
    """A CPU limit could not be set, or was refused by the kernel."""


class LaunchError(EvenstrideError, RuntimeError):
    """A local worker failed or never answered; the message ends with its last output."""


def to_plain(error: EvenstrideError) -> dict[str, Any]:
    """Return the error as JSON types, to be raised alike on other ranks."""
    reduced = error.__reduce__()
    assert isinstance(reduced, tuple), "exceptions reduce to a class and its arguments"
    return {"type": type(error).__name__, "arguments": list(reduced[1])}


def from_plain(plain: dict[str, Any]) -> EvenstrideError:
    """Return the error that `to_plain` wrote."""
    kind = globals().get(plain["type"], EvenstrideError)
    if not (isinstance(kind, type) and issubclass(kind, EvenstrideError)):
        kind = EvenstrideError
    return kind(*plain["arguments"])
