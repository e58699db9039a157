"""Agreement on settings before training: all ranks show theirs, and the leader decides for all.

An error found here is raised on every rank. So no rank trains, and no rank hangs in a collective
that another never enters.
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

Passed = Callable[[list[int]], dict[int, str]]
"""Returns which of some ranks are past a call, and what each of them does."""

logger = logging.getLogger("evenstride")

# With more ranks, a rank that waits does not ask the store which of them are missing.
_FEW_RANKS = 64


def agree(
    channel: Channel,
    topic: str,
    show: Callable[[], Plain],
    judge: Callable[[list[Plain]], Plain],
    call: str = "",
    passed: Passed | None = None,
    before: str = "",
) -> Plain:
    """Return the leader's verdict on what all ranks show; a collective call.

    A rank that waits long logs the call and the ranks that it waits for.

    Args:
        channel: connects the ranks that must agree.
        topic: name of the agreement, used once per channel and shown in errors.
        show: returns this rank's settings as JSON types.
        judge: called on the leader with all ranks' settings in rank order; returns the verdict as
            JSON types. An `EvenstrideError` of either is raised on every rank.
        call: name of the call that this rank makes, if ``topic`` does not name it.
        passed: called while this rank waits, with the ranks that it waits for; returns those that
            are past this call, and what each of them does. What it raises ends the wait.
        before: the previous topic on the same channel. All ranks have read its verdict by now.

    Raises:
        RanksDisagree: a rank is past this call and has not made it.
        WorkerLost: some rank did not make the call within the group's timeout.
    """
    try:
        mine = json.dumps({"ok": show()})
    except Exception as error:  # of any type: the other ranks must not wait for ever
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
    channel: Channel
    topic: str
    call: str
    passed: Passed | None

    @property
    def shown(self) -> list[str]:
        return [f"{self.topic}/rank/{rank}" for rank in range(self.channel.world_size)]

    def over(self, keys: list[str], timeout: timedelta) -> list[str]:
        """Return the texts of the keys once all exist."""
        look = None if self.passed is None else partial(self._look, keys, self.passed)
        try:
            return self.channel.meet(keys, timeout, self._log_wait, look)
        except WorkerLost:
            raise
        except RuntimeError as error:
            try:
                missing = _ranks_of(self.channel.missing(keys))
            except RuntimeError:
                raise WorkerLost(
                    "the process group's store is gone, because the rank or launcher that hosts "
                    f"it has ended, so {self.call} cannot finish ({error})"
                ) from error
            raise WorkerLost(
                f"{missing} did not reach {self.call} within {timeout.total_seconds():.0f} s; "
                "every rank must make the same calls in the same order"
            ) from error

    def _look(self, keys: list[str], passed: Passed) -> None:
        """Raise if a rank that this one waits for is past this call without having made it."""
        whose = dict(zip(range(len(keys)), keys, strict=True))  # the verdict is rank 0's
        skipped = {rank: does for rank, does in passed(list(whose)).items() if rank in whose}
        skipped = {r: d for r, d in skipped.items() if self.channel.missing([whose[r]])}
        if skipped:
            shown = ", ".join(f"rank {rank} ({does})" for rank, does in list(skipped.items())[:8])
            raise RanksDisagree(
                f"rank {self.channel.rank} waits in {self.call}, but {shown} continued without "
                f"calling it; every rank must call {self.call} equally often and at the same places"
            )

    def _log_wait(self) -> None:
        channel = self.channel
        missing = "the other ranks"
        if channel.rank == 0 or channel.world_size <= _FEW_RANKS:
            missing = _ranks_of(channel.missing(self.shown))
        tell_of_wait(channel.rank, self.call, missing)


def _ranks_of(missing: list[str]) -> str:
    ranks = [int(key.rpartition("/")[2]) for key in missing if not key.endswith("/verdict")]
    return f"rank {listed(ranks or [0])}"  # the verdict is rank 0's


def _judged(wait: _Wait, judge: Callable[[list[Plain]], Plain], before: str) -> Plain:
    channel = wait.channel
    try:
        shown = [json.loads(text) for text in wait.over(wait.shown, channel.timeout)]
        # All ranks have reached this topic, so all have read the previous verdict.
        if before:
            channel.forget(f"{before}/verdict")
        errors = [mine for mine in shown if "error" in mine]
        verdict = errors[0] if errors else {"ok": judge([mine["ok"] for mine in shown])}
    except Exception as error:  # see `agree`
        verdict = {"error": to_plain(_ours(error))}
    text = json.dumps(verdict)
    channel.show(f"{wait.topic}/verdict", text)
    # Decoded from JSON, so that the leader gets the same types as the others.
    return dict(json.loads(text))


def _ours(error: Exception) -> EvenstrideError:
    if isinstance(error, EvenstrideError):
        return error
    logger.error("an unexpected error", exc_info=error)
    return EvenstrideError(f"{type(error).__name__}: {error}")


def _heard(wait: _Wait) -> Plain:
    # The leader waits one timeout for the others; leave it time to report which rank is missing.
    patience = wait.channel.timeout + timedelta(seconds=10)
    (text,) = wait.over([f"{wait.topic}/verdict"], patience)
    return dict(json.loads(text))


def named(
    call: str, show: Callable[[], Plain], judge: Callable[[list[Plain]], Plain]
) -> tuple[Callable[[], Plain], Callable[[list[Plain]], Plain]]:
    """Return both functions with the call's name added, so that an error can report mismatches."""

    def show_both() -> Plain:
        return {"call": call, "shown": show()}

    def judge_both(shown: list[Plain]) -> Plain:
        calls = {rank: mine["call"] for rank, mine in enumerate(shown)}
        if len(set(calls.values())) > 1:
            shown_calls = ", ".join(f"rank {rank} {call}" for rank, call in list(calls.items())[:8])
            raise RanksDisagree(
                f"the ranks are in different calls ({shown_calls}); every rank must make the same "
                "calls of loader(), watch(), sync_batch_norm() and mean() in the same order"
            )
        return judge([mine["shown"] for mine in shown])

    return show_both, judge_both


def require_equal(
    settings: list[Plain], topic: str, remedies: Mapping[str, str] | None = None
) -> None:
    """Raise `RanksDisagree` unless all ranks show the same value for every setting.

    ``settings`` are in rank order. ``remedies`` has specific advice for some of the settings.
    """
    for name in settings[0]:
        values: dict[str, list[int]] = {}
        for rank, mine in enumerate(settings):
            values.setdefault(json.dumps(mine.get(name)), []).append(rank)
        if len(values) > 1:
            shown = "; ".join(f"{value} on rank {listed(ranks)}" for value, ranks in values.items())
            raise RanksDisagree(
                f"the ranks disagree on {name} of {topic}: {shown}; "
                + (remedies or {}).get(name, "give every rank the same value")
            )


def listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ..." if len(ranks) > 8 else shown
