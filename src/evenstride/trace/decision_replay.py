"""Repeat all decisions of a trace, and compare them byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenstride.core.control.advance import advance
from evenstride.core.control.state import Control
from evenstride.core.policies import policy_from_spec
from evenstride.core.policy import Policy
from evenstride.errors import TraceError, UnknownPolicy
from evenstride.trace.codec import decode, dumps, encode
from evenstride.trace.read import read_records


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay.

    Args:
        events: number of events replayed.
        differences: for each differing event its number (from 0), and both texts of the
            instructions: recorded, replayed.
    """

    events: int
    differences: tuple[tuple[int, str, str], ...]

    @property
    def identical(self) -> bool:
        """Whether every decision was the same."""
        return not self.differences


def replay(run: Path, policy: Policy[Any] | None = None) -> Replay:
    """Return the decisions on a trace's events, compared with the recorded ones.

    The same machine and numpy give the same bytes. An event whose instructions were cut off
    by a crash is replayed but not compared.

    Args:
        run: The trace.
        policy: The policy of the run, if it was an object of the script; otherwise the trace
            names it.

    Raises:
        TraceError: the trace cannot be read, or has no header with a policy.
    """
    outcome, control, pending = Replay(0, ()), None, None
    for record in read_records(run):
        match record["kind"]:
            case "header":
                control, pending = _start(record, policy), None
            case "event" if pending is not None:
                raise TraceError(
                    f"event {outcome.events - 1} of the trace has no instructions, but the trace "
                    "continues; it was changed after it was written"
                )
            case "event" if control is not None:
                event: Any = decode(record["event"])
                control, verdict = advance(control, event)
                pending = dumps([encode(part) for part in verdict])
                outcome = replace(outcome, events=outcome.events + 1)
            case "instructions" if pending is not None:
                outcome, pending = _compare(outcome, dumps(record["instructions"]), pending), None
    return outcome


def _start(header: dict[str, Any], policy: Policy[Any] | None) -> Control:
    spec = header.get("policy")
    if not isinstance(spec, str):
        raise TraceError("cannot replay the trace: its header names no policy")
    try:
        policy = policy or policy_from_spec(spec, imported=False)
    except UnknownPolicy:
        raise TraceError(
            f"cannot replay policy {spec}: it is not a policy of evenstride, so the trace does not "
            "contain its rule; pass it to replay(run, policy=...)"
        ) from None
    # A trace without the fraction is of a version without memory limits.
    return Control(policy, memory_fraction=header.get("memory_fraction"))


def _compare(outcome: Replay, recorded: str, replayed: str) -> Replay:
    if recorded == replayed:
        return outcome
    difference = (outcome.events - 1, recorded, replayed)
    return replace(outcome, differences=(*outcome.differences, difference))
