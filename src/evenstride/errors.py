"""All exceptions that evenstride raises on purpose.

EvenstrideError
├── ConfigError            the request is invalid; change the configuration.
│   ├── InfeasibleShares   no split of the global batch satisfies the workers' bounds.
│   ├── UnknownPolicy      no policy has this name.
│   ├── RanksDisagree      the ranks have different settings.
│   └── ScenarioError      a scenario file cannot be simulated.
├── UsageError             the training loop breaks the contract of `Stride`.
│   ├── LoaderBusy         two loops draw from one loader.
│   ├── ScaleError         a batch was scaled twice or not at all.
│   └── StepInFlight       the state was requested in the middle of a step.
├── OutOfMemory            a batch does not fit, and its step cannot be repeated.
├── WorkerLost             another rank is gone; this rank cannot finish its step.
├── CheckpointError        a checkpoint could not be saved, or no checkpoint can be read.
│   └── CheckpointDamaged  a file of a checkpoint does not match its manifest.
├── SplitDiverged          a rank applied other shares than the leader decided.
├── TraceError             a trace file cannot be read.
├── LimitError             a CPU limit could not be set or kept.
└── LaunchError            a local worker failed or did not respond.

Each message has three parts: what was requested, what is possible, what to change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any


class EvenstrideError(Exception):
    """Base class of all exceptions that evenstride raises on purpose."""


def did_you_mean(given: str, known: Sequence[str]) -> str:
    """Return a hint at the known name nearest to an unknown one; empty if no name is near."""
    names = {name.lower(): name for name in known}
    near = get_close_matches(given.lower(), names, n=1)
    return f" (did you mean {names[near[0]]}?)" if near else ""


class ConfigError(EvenstrideError, ValueError):
    """The request is invalid; change the configuration. Nothing was changed."""


class InfeasibleShares(ConfigError):
    """No split of the global batch satisfies the workers' bounds.

    Args:
        total: samples of the global batch.
        at_least: the smallest global batch that has a split.
        at_most: the largest; ``None`` if there is no limit.
        workers: number of workers.
        quanta: the distinct quanta of the workers.
        narrow: a worker without a possible share: rank, fewest and most samples, quantum.
        fewest: the distinct ``min_share`` of the workers; empty if not known.
        most: the distinct ``max_share`` below ``total``; empty if not known.
    """

    def __init__(
        self,
        total: int,
        at_least: int,
        at_most: int | None,
        workers: int,
        quanta: Sequence[int] = (1,),
        narrow: Sequence[int] | None = None,
        fewest: Sequence[int] = (),
        most: Sequence[int] = (),
    ) -> None:
        self.total, self.at_least, self.at_most, self.workers = total, at_least, at_most, workers
        self.quanta, self.narrow = tuple(quanta), None if narrow is None else tuple(narrow)
        self.fewest, self.most = tuple(fewest), tuple(most)
        multiples = " and ".join(map(str, self.quanta)) if len(self.quanta) <= 4 else "their quanta"
        within = f" in multiples of {multiples}" if max(self.quanta) > 1 else ""
        asked = f"cannot split a global batch of {total} samples"
        if self.narrow is not None:
            more = f" (and the global batch to {at_least})" if at_least > total else ""
            super().__init__(asked + _no_multiple(within, more, *self.narrow))
            return
        possible = f"at least {at_least}" if at_most is None else f"{at_least} to {at_most}"
        rest = " (one worker may take a remainder)" if within and at_most is not None else ""
        named, fixes = self._too_small() if total < at_least else self._too_large()
        super().__init__(
            f"{asked}: the {workers} workers together accept {possible}{within}{rest}"
            f"{', because ' + ' and '.join(named) if named else ''}; "
            f"{', '.join(fixes[:-1])}, or {fixes[-1]}"
        )

    def _too_small(self) -> tuple[list[str], list[str]]:
        """Return the settings that prevent a split, and the possible remedies."""
        each, least, quantum = self.total // self.workers, max(self.fewest, default=0), self.quanta
        fixes = [f"raise the global batch to at least {self.at_least}", "use fewer workers"]
        named = [_setting("quantum", quantum)] if max(quantum) > 1 else []
        if least > 1:
            named.append(_setting("min_share", self.fewest))
        if max(quantum) > 1:
            fixes.append(
                f"lower quantum to at most {each}" if least == 1 <= each else "lower quantum"
            )
        if least > 1 and max(quantum) == 1:
            fixes.append(f"lower min_share to at most {each}" if each else "lower min_share")
        elif least != 1:
            fixes.append("lower min_share")
        return named or (["each takes at least 1"] if least == 1 else []), fixes

    def _too_large(self) -> tuple[list[str], list[str]]:
        """Return the settings that prevent a split, and the possible remedies."""
        quantum, more = self.quanta, ""
        if len(quantum) == 1 and self.most and 0 not in self.most:
            each = -(-self.total // self.workers)
            more = f" to at least {each + -each % quantum[0]}"
        fixes = [f"lower the global batch to at most {self.at_most}", f"raise max_share{more}"]
        named = [_setting("max_share", self.most)] if any(self.most) else []
        if max(quantum) > 1:
            named.append(_setting("quantum", quantum))
            fixes.append("lower quantum")
        return named, [*fixes, "add a worker"]

    def __reduce__(self) -> tuple[type[InfeasibleShares], tuple[Any, ...]]:
        asked = (self.total, self.at_least, self.at_most, self.workers, self.quanta, self.narrow)
        return InfeasibleShares, (*asked, self.fewest, self.most)


def _setting(name: str, values: Sequence[int]) -> str:
    ends = sorted({value for value in values if value})
    shown = f"{ends[0]} to {ends[-1]}" if len(ends) > 4 else " and ".join(map(str, ends))
    return f"{name} is {shown}"


def _no_multiple(within: str, more: str, rank: int, lower: int, upper: int, quantum: int) -> str:
    """Return the message for a worker whose bounds contain no multiple of its quantum."""
    return (
        f"{within}: worker {rank} accepts {lower} to {upper} samples (min_share={lower}, "
        f"max_share={upper}), but this range has no multiple of its quantum={quantum}; raise "
        f"max_share to at least {lower + -lower % quantum}{more}, or choose a "
        "smaller quantum for it"
    )


class UnknownPolicy(ConfigError):
    """No policy has this name; the message lists the available policies."""

    def __init__(self, asked: str, known: Sequence[str]) -> None:
        self.asked, self.known = asked, tuple(known)
        hint = did_you_mean(re.split("[(:]", asked)[0], known)
        super().__init__(
            f"unknown policy {asked!r}{hint}; available policies: {', '.join(known)} "
            "(write a fixed split as static:20,100)"
        )

    def __reduce__(self) -> tuple[type[UnknownPolicy], tuple[str, tuple[str, ...]]]:
        return UnknownPolicy, (self.asked, self.known)


class RanksDisagree(ConfigError):
    """The ranks have different settings, so they would not train the same thing."""


class ScenarioError(ConfigError):
    """A scenario file cannot be simulated; the message names file, line, field and range."""


class UsageError(EvenstrideError, RuntimeError):
    """The training loop breaks the contract of `Stride`; the message names the line to change."""


class LoaderBusy(UsageError):
    """Two loops draw from one training loader at the same time."""


class ScaleError(UsageError):
    """A batch's loss was scaled twice, or its step had no scaled backward pass."""


class StepInFlight(UsageError):
    """The state was requested between a step's backward pass and its optimizer step."""


class OutOfMemory(EvenstrideError, RuntimeError):
    """A batch does not fit into memory, and the step cannot be repeated in smaller parts."""


class WorkerLost(EvenstrideError, RuntimeError):
    """Another rank is gone, so the step in progress cannot be finished."""


class CheckpointError(EvenstrideError, RuntimeError):
    """A checkpoint could not be saved, or no existing checkpoint can be read."""


class CheckpointDamaged(CheckpointError):
    """A file of a checkpoint is missing, or its size or content differs from the manifest."""


class SplitDiverged(EvenstrideError, RuntimeError):
    """A rank applied other shares, or is at another position in the data, than the leader."""


class TraceError(EvenstrideError, ValueError):
    """A trace file cannot be read; the message names the file and the line."""


class LimitError(EvenstrideError, OSError):
    """A CPU limit could not be set, or the kernel refused it."""


class LaunchError(EvenstrideError, RuntimeError):
    """A local worker failed or did not respond; the message ends with its last output."""


def to_plain(error: EvenstrideError) -> dict[str, Any]:
    """Return the error as JSON types, so that other ranks can raise the same error."""
    reduced = error.__reduce__()
    assert isinstance(reduced, tuple), "exceptions reduce to a class and its arguments"
    return {"type": type(error).__name__, "arguments": list(reduced[1])}


def from_plain(plain: dict[str, Any]) -> EvenstrideError:
    """Return the error that `to_plain` wrote."""
    kind = globals().get(plain["type"], EvenstrideError)
    if not (isinstance(kind, type) and issubclass(kind, EvenstrideError)):
        kind = EvenstrideError
    return kind(*plain["arguments"])
