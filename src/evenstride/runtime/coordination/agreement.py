"""Before any training: all ranks show their settings, the leader judges, all hear the same.

An error found here is raised alike on every rank, so that no rank trains, and none hangs in a
collective that another never enters.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from evenstride.errors import EvenstrideError, RanksDisagree, WorkerLost, from_plain, to_plain
from evenstride.runtime.store.store_channel import Channel, tell_of_wait

Plain = dict[str, Any]

logger = logging.getLogger("evenstride")

# In larger teams a rank that waits does not ask for each of the others who is missing.
_FEW_RANKS = 64


def agree(
    channel: Channel,
    topic: str,
    show: Callable[[], Plain],
    judge: Callable[[list[Plain]], Plain],
    call: str = "",
    passed: Callable[[], dict[int, str]] | None = None,
    before: str = "",
) -> Plain:
    """Return the leader's verdict on what all ranks show; collective.

    A rank that waits for others logs after a while in which call, and for whom.

    Args:
        channel: of the ranks that must agree.
        topic: what is agreed on, a name used once per channel and shown in errors.
        show: returns this rank's settings as JSON types.
        judge: called on the leader with all ranks' settings in rank order; returns the verdict as
            JSON types. An `EvenstrideError` of either is raised on every rank.
        call: that this rank makes, if ``topic`` does not name it.
        passed: called while this rank waits; returns the ranks that are past this call, and what
            each of them does. What it raises ends the wait.
        before: the topic before this one on the same channel, whose verdict all have then read.

    Raises:
        RanksDisagree: a rank is past this call and has not made it.
        WorkerLost: some rank did not come within the group's timeout.
    """
    try:
        mine = json.dumps({"ok": show()})
    except Exception as error:  # whatever it is, the other ranks must not wait for ever
        mine = json.dumps({"error": to_plain(_ours(error))})
    channel.show(f"{topic}/rank/{channel.rank}", mine)
    wait = _Wait(channel, topic, call or topic, passed)
    verdict = _judged(wait, judge, before) if channel.rank == 0 else _heard(wait)
    channel.forget(f"{topic}/rank/{channel.rank}")  # loops that agree often must not fill the store
    if "error" in verdict:
        raise from_plain(verdict["error"])
    return dict(verdict["ok"])


@dataclass(frozen=True, slots=True)
class _Wait:
    """For what all ranks, or the leader, say to a topic."""

    channel: Channel
    topic: str
    call: str
    passed: Callable[[], dict[int, str]] | None

    @property
    def shown(self) -> list[str]:
        return [f"{self.topic}/rank/{rank}" for rank in range(self.channel.world_size)]

    def over(self, keys: list[str], timeout: timedelta) -> list[str]:
        """Return the texts of the keys once they are there."""
        look = None if self.passed is None else partial(self._look, keys, self.passed)
        try:
            return self.channel.meet(keys, timeout, self._tell, look)
        except WorkerLost:
            raise
        except RuntimeError as error:
            try:
                who = _whom(self.channel.missing(keys))
            except RuntimeError:
                raise WorkerLost(
                    "the process group's store is gone, and with it the rank or launcher that "
                    f"hosts it, so {self.call} cannot be finished ({error})"
                ) from error
            raise WorkerLost(
                f"{who} did not reach {self.call} within {timeout.total_seconds():.0f} s; every "
                "rank must make the same calls in the same order"
            ) from error

    def _look(self, keys: list[str], passed: Callable[[], dict[int, str]]) -> None:
        """Raise if a rank for whose key this one waits has gone past this call."""
        whose = dict(zip(range(len(keys)), keys, strict=True))  # the verdict is rank 0's
        skipped = {rank: does for rank, does in passed().items() if rank in whose}
        skipped = {r: d for r, d in skipped.items() if self.channel.missing([whose[r]])}
        if skipped:
            told = ", ".join(f"rank {rank} ({does})" for rank, does in list(skipped.items())[:8])
            raise RanksDisagree(
                f"rank {self.channel.rank} waits in {self.call}, and {told} went on without "
                f"calling it; every rank must call {self.call} equally often and at the same places"
            )

    def _tell(self) -> None:
        channel = self.channel
        whom = "the other ranks"
        if channel.rank == 0 or channel.world_size <= _FEW_RANKS:
            whom = _whom(channel.missing(self.shown))
        tell_of_wait(channel.rank, self.call, whom)


def _whom(missing: list[str]) -> str:
    ranks = [int(key.rpartition("/")[2]) for key in missing if not key.endswith("/verdict")]
    return f"rank {listed(ranks or [0])}"  # the verdict is rank 0's


def _judged(wait: _Wait, judge: Callable[[list[Plain]], Plain], before: str) -> Plain:
    channel = wait.channel
    try:
        shown = [json.loads(text) for text in wait.over(wait.shown, channel.timeout)]
        # All have come to this topic, so all have read the verdict before it.
        if before:
            channel.forget(f"{before}/verdict")
        errors = [mine for mine in shown if "error" in mine]
        verdict = errors[0] if errors else {"ok": judge([mine["ok"] for mine in shown])}
    except Exception as error:  # likewise
        verdict = {"error": to_plain(_ours(error))}
    text = json.dumps(verdict)
    channel.show(f"{wait.topic}/verdict", text)
    # Read back from JSON, so that the leader gets the same types as the others.
    return dict(json.loads(text))


def _ours(error: Exception) -> EvenstrideError:
    if isinstance(error, EvenstrideError):
        return error
    logger.error("an error that is not ours", exc_info=error)
    return EvenstrideError(f"{type(error).__name__}: {error}")


def _heard(wait: _Wait) -> Plain:
    # The leader waits one timeout for the others; leave it time to say who was missing.
    patience = wait.channel.timeout + timedelta(seconds=10)
    (text,) = wait.over([f"{wait.topic}/verdict"], patience)
    return dict(json.loads(text))


def named(
    call: str, show: Callable[[], Plain], judge: Callable[[list[Plain]], Plain]
) -> tuple[Callable[[], Plain], Callable[[list[Plain]], Plain]]:
    """Return both with the name of the call added, so that ranks in different calls are told so."""

    def show_both() -> Plain:
        return {"call": call, "shown": show()}

    def judge_both(shown: list[Plain]) -> Plain:
        calls = {rank: mine["call"] for rank, mine in enumerate(shown)}
        if len(set(calls.values())) > 1:
            told = ", ".join(f"rank {rank} {call}" for rank, call in list(calls.items())[:8])
            raise RanksDisagree(
                f"the ranks are in different calls ({told}); every rank must make the same calls "
                "of loader(), watch(), sync_batch_norm() and mean() in the same order"
            )
        return judge([mine["shown"] for mine in shown])

    return show_both, judge_both


def require_equal(
    settings: list[Plain], topic: str, remedies: Mapping[str, str] | None = None
) -> None:
    """Raise `RanksDisagree` unless all ranks show the same value for every setting.

    ``settings`` are in rank order. ``remedies`` say what to do about a setting that differs, where
    there is more to say.
    """
    for name in settings[0]:
        values: dict[str, list[int]] = {}
        for rank, mine in enumerate(settings):
            values.setdefault(json.dumps(mine.get(name)), []).append(rank)
        if len(values) > 1:
            told = "; ".join(f"{value} on rank {listed(ranks)}" for value, ranks in values.items())
            raise RanksDisagree(
                f"the ranks disagree on {name} of {topic}: {told}; "
                + (remedies or {}).get(name, "give every rank the same")
            )


def listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ..." if len(ranks) > 8 else shown
