"""Know when another rank is gone, and name it before this process ends, too.

A rank that dies closes its connections, so the survivors' collective fails within moments with
a message that names nobody; a rank that hangs lets them wait for the group's whole timeout.
Three sources tell who it was:

* on the same machine the kernel reports the end of a process at once;
* every rank's heartbeat in the store says each second what its training thread is doing;
* a program that ends says so in the store, with the error it ended with, if any.

Whoever finds out first tells all others through the store.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evenstride.runtime.channel import Channel
from evenstride.runtime.peers import Peer, watch_exit

logger = logging.getLogger("evenstride")

# Of an error's text that the other ranks are told; ours end with what to change.
_MOST_TEXT = 700

BEAT_S = 1.0
# A heart that has not beaten for so long has stopped.
SILENT_S = 3.5
# So has one that has not for so long while this rank's own has beaten twice: then it is not this
# machine that is held up. Launchers wait for the end of the processes that look for it.
MISSED_S = 2.25
# How long a step may wait for another rank before a warning names that rank.
WARN_AFTER_S = 30.0
# How long a step waits before the hearts of the others are watched.
WATCH_AFTER_S = 3.0
# What a rank may be doing that waits for others, and that nothing can interrupt: sharded models
# wait in their passes, too. Where all agree on the next epoch's batch, it can be told of a loss.
STUCK_PHASES = ("sync", "compute")
_WAITING_PHASES = (*STUCK_PHASES, "turn")


@dataclass(frozen=True, slots=True)
class Beat:
    """One rank's heartbeat: a counter, and what its training thread is doing in which step."""

    count: int
    phase: str
    step: int

    @property
    def where(self) -> str:
        """What the rank was doing, in words."""
        return f"{self.phase} of step {self.step}" if self.step >= 0 else "before its first step"


class Liveness:
    """The heartbeat thread of one rank.

    Args:
        channel: to the other ranks.
        peers: all ranks' processes, in rank order.
        at: what the training thread is doing, and in which step.
        lost: called at most once, on this thread, with the rank that is gone and a sentence.
        silent_s: a rank is gone when its heart has not beaten for so long while a step waits;
            ``None`` to wait for ever, where nobody would start the ranks again.
    """

    def __init__(
        self,
        channel: Channel,
        peers: tuple[Peer, ...],
        at: Callable[[], tuple[str, int]],
        lost: Callable[[int, str], None],
        silent_s: float | None = None,
    ) -> None:
        self._channel, self._peers, self._at, self._lost = channel, peers, at, lost
        self._silent_s = silent_s
        self._heard: dict[int, tuple[Beat, float]] = {}
        self._count, self._cpu_s = 0, 0.0
        self._closing = False
        self._waiting_since: tuple[tuple[str, int], float] = (("idle", -1), time.monotonic())
        self._wake_r, self._wake_w = os.pipe()
        self._fds = {
            fd: peer
            for peer in peers
            if peer.rank != channel.rank and (fd := watch_exit(peer)) is not None
        }
        self._beat()
        self._thread = threading.Thread(target=self._run, name="evenstride-liveness", daemon=True)
        self._thread.start()

    @property
    def cpu_s(self) -> float:
        """Processor time the thread has used so far, in seconds."""
        return self._cpu_s

    def close(self, goodbye: dict[str, Any]) -> None:
        """Say goodbye and end the thread. May be called again."""
        if self._closing:
            return
        self._closing = True
        try:
            self._channel.put(f"bye/{self._channel.rank}", json.dumps(goodbye))
        except RuntimeError:
            logger.debug("the store was gone before the goodbye", exc_info=True)
        os.write(self._wake_w, b"x")
        self._thread.join(2 * BEAT_S)
        if self._thread.is_alive():  # held up by the store; the process is ending anyway
            return
        for fd in (*self._fds, self._wake_r, self._wake_w):
            os.close(fd)

    def beats(self) -> dict[int, Beat]:
        """Return every rank's latest heartbeat."""
        return {rank: Beat(*told) for rank, told in self._told("beat").items()}

    def goodbyes(self) -> dict[int, dict[str, Any]]:
        """Return what the ranks that have ended said."""
        return self._told("bye")

    def _told(self, kind: str, peers: tuple[Peer, ...] = ()) -> dict[int, Any]:
        keys = {f"{kind}/{peer.rank}": peer.rank for peer in peers or self._peers}
        here = [key for key in keys if self._channel.present([key])[0]]
        texts = self._channel.read(here) if here else []
        return {keys[key]: json.loads(text) for key, text in zip(here, texts, strict=True)}

    def _run(self) -> None:
        poller = select.poll()
        for fd in (*self._fds, self._wake_r):
            poller.register(fd, select.POLLIN)
        try:
            while not self._closing:
                ended = [fd for fd, _ in poller.poll(BEAT_S * 1e3) if fd in self._fds]
                for fd in ended:
                    poller.unregister(fd)
                    self._ended(self._fds[fd])
                self._beat()
                self._warn_if_waiting()
                self._cpu_s = time.thread_time()
        except RuntimeError:  # the store is gone: the control thread tells about that
            logger.debug("the liveness thread lost the store", exc_info=True)

    def _beat(self) -> None:
        self._count += 1
        self._channel.put(f"beat/{self._channel.rank}", json.dumps([self._count, *self._at()]))

    def _ended(self, peer: Peer) -> None:
        if self._closing:
            return
        goodbye = self._told("bye", (peer,)).get(peer.rank)  # the launcher ends us within moments
        if goodbye is None:
            self._lost(peer.rank, f"its process {peer.pid} on {peer.host} ended")
        elif goodbye.get("error"):
            self._lost(peer.rank, f"it ended with {goodbye['error']}")

    def _warn_if_waiting(self) -> None:
        at, now_s = self._at(), time.monotonic()
        if at != self._waiting_since[0]:
            self._waiting_since = (at, now_s)
            self._heard.clear()
            return
        phase, step = at
        if phase in _WAITING_PHASES:
            self._look_for_silence(now_s)
        limit_s = min(WARN_AFTER_S, 0.5 * self._channel.timeout.total_seconds())
        waited_s = now_s - self._waiting_since[1]
        if phase in ("sync", "turn") and limit_s <= waited_s < limit_s + 2 * BEAT_S:
            self._waiting_since = (at, now_s - 10 * limit_s)  # say it once per step
            behind = {r: b for r, b in self.beats().items() if (b.phase, b.step) != at}
            if behind:
                logger.warning("step %d has waited %.0f s for %s", step, waited_s, _told(behind))

    def _look_for_silence(self, now_s: float) -> None:
        """Take a rank for lost whose heart has stopped while a step may wait for it."""
        if self._silent_s is None or now_s - self._waiting_since[1] < WATCH_AFTER_S:
            return
        for rank, beat in self.beats().items():
            known, since_s = self._heard.get(rank, (None, now_s))
            self._heard[rank] = (beat, since_s if beat == known else now_s)
            silent_s = now_s - self._heard[rank][1]
            if rank != self._channel.rank and silent_s >= self._silent_s and not self._closing:
                self._lost(rank, f"no heartbeat for {silent_s:.0f} s, since {beat.where}")
                return


def _told(beats: dict[int, Beat]) -> str:
    return ", ".join(f"rank {r} ({b.where})" for r, b in sorted(beats.items()))


def diagnose(
    liveness: Liveness, rank: int, step: int, known: Callable[[], bool]
) -> tuple[int, str] | None:
    """Return which rank broke the collective of ``step`` and how that is known, or ``None``.

    Called by a rank whose own collective failed; watches the others for as long as it takes to
    tell a silent heart from a slow one: `MISSED_S`, or `SILENT_S` where its own heart is slow.

    Args:
        liveness: of this rank.
        rank: this rank.
        step: the step whose collective failed.
        known: whether the answer has come from elsewhere, so that watching is pointless.
    """
    first, started_s = liveness.beats(), time.monotonic()
    while (watched_s := time.monotonic() - started_s) < SILENT_S and not known():
        for other, goodbye in liveness.goodbyes().items():
            if other != rank and goodbye.get("step", step) <= step:
                error = goodbye.get("error")
                return other, f"it ended with {error}" if error else "its program ended early"
        if watched_s >= MISSED_S:
            now = liveness.beats()
            if now[rank].count >= first[rank].count + 2 and (missed := _missed(first, now, rank)):
                return missed
        time.sleep(0.1)
    now = liveness.beats()
    if missed := _missed(first, now, rank):
        return missed
    for other, beat in now.items():
        if other != rank and beat.phase not in ("sync", "failed") and beat.step <= step:
            return other, f"still in {beat.where}"
    return None


def _missed(first: dict[int, Beat], now: dict[int, Beat], rank: int) -> tuple[int, str] | None:
    """Return another rank whose heart has not beaten in between."""
    for other, beat in now.items():
        if other != rank and first.get(other) == beat:
            return other, f"no heartbeat since {beat.where}"
    return None


def ending_exception() -> BaseException | None:
    """Return the uncaught exception this program is ending with, if any."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


def ending_error() -> str | None:
    """Return the uncaught exception this program is ending with, as one line, if any.

    An interrupt from the keyboard reaches all ranks alike and is not reported.
    """
    error = ending_exception()
    if error is None or isinstance(error, KeyboardInterrupt):
        return None
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_MOST_TEXT]}"
