"""Know when another rank is gone, and name it before this process ends, too.

A rank that dies closes its connections, so the survivors' collective fails within moments with
a message that names nobody; a rank that hangs lets them wait for the group's whole timeout.
Three sources tell who it was:

* on the same machine the kernel reports the end of a process at once;
* every rank's heartbeat in the store says each second what its training thread is doing;
* the last heartbeat of a program that ends says so, with the error it ended with, if any.

Whoever finds out first tells all others through the store.

A rank watches the heart of the next rank only, in a ring, so that a second of waiting costs the
store one request per rank. If that heart has stopped, the rank goes on to the one after it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from evenstride.errors import EvenstrideError, WorkerLost
from evenstride.runtime.failures.peers import Peer, watch_exit
from evenstride.runtime.store.store_channel import Channel

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
# wait in their passes, too. Where all agree on the next epoch's batch, or take a mean, a rank can
# be told of a loss.
STUCK_PHASES = ("sync", "compute")
_WAITING_PHASES = (*STUCK_PHASES, "decision", "turn", "agreement")
# Phases in which a long wait is worth a warning. A rank that computes may be at work, or wait in a
# collective of its model, so it names only ranks that left the loop.
_WARNED_PHASES = ("sync", "decision", "turn", "compute")
_WORDS = {
    "agreement": "waiting for the other ranks in step {}",
    "decision": "waiting for the shares of step {}",
    "left": "it left the training loop in step {}; all ranks must leave it after the same step",
}
# How long before the process group's timeout a rank names those that it waits for once more: NCCL
# ends the process at that moment, and nothing of ours runs any more.
_BEFORE_TIMEOUT_S = 10.0
# The phase of a rank whose program has ended.
ENDED = "ended"
# How often a rank whose collective failed reads all heartbeats, and for how many ranks.
_NAP_S, _NAP_RANKS = 0.1, 32

# Signs in an error's text that a collective, and not the user's own code, has failed.
_OF_COLLECTIVES = ("gloo", "nccl", "connection", "socket", "timed out", "timeout", "peer")


@dataclass(frozen=True, slots=True)
class Beat:
    """One rank's heartbeat."""

    count: int  # of its beats so far
    phase: str  # what its training thread is doing; `ENDED` once its program has ended
    step: int  # in which step
    error: str | None = None  # that its program ended with, if it did

    @property
    def where(self) -> str:
        """What the rank was doing, in words."""
        if self.phase == ENDED:
            return "its program ended early"
        if self.step < 0:
            return "before its first step"
        return _WORDS.get(self.phase, f"{self.phase} of step {{}}").format(self.step)

    @property
    def steps(self) -> float:
        """Steps that the rank has finished or begun to synchronise, as far as is known."""
        if self.phase == ENDED:
            return math.inf
        return self.step + (self.phase in ("sync", "between"))


class Heartbeats:
    """The heartbeat thread of one rank.

    Args:
        channel: to the other ranks.
        peers: all ranks' processes, in rank order.
        at: what the training thread is doing, and in which step.
        lost: called at most once, on this thread, with the rank that is gone and a sentence.
        silent_s: a rank is gone when its heart has not beaten for so long while a step waits;
            ``None`` to wait for ever, where nobody would start the ranks again.
        ring: whether to watch the next rank only, as all ranks wait for one that is gone. Where
            they do not, each rank must watch all others.
    """

    def __init__(
        self,
        channel: Channel,
        peers: tuple[Peer, ...],
        at: Callable[[], tuple[str, int]],
        lost: Callable[[int, str], None],
        silent_s: float | None = None,
        *,
        ring: bool = True,
    ) -> None:
        self._channel, self._at, self._lost = channel, at, lost
        self._silent_s = silent_s
        ranks = [peer.rank for peer in peers]
        self._begun, self._ranks = False, ranks  # whether every rank's heart has beaten once
        mine = channel.rank
        self._others = [*(r for r in ranks if r > mine), *(r for r in ranks if r < mine)]
        self._watched = 1 if ring else len(ranks)
        self._heard: dict[int, tuple[Beat, float]] = {}
        self._count, self._cpu_s = 0, 0.0
        self._closing, self._beating = False, threading.Lock()
        self._waiting_since: tuple[tuple[str, int], float] = (("idle", -1), time.monotonic())
        self._warned = 0  # how often of the present wait
        # Wakes the thread from its poll when it has to end.
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

    def close(self, step: int, error: str | None) -> None:
        """Say that this program ends, in which step and by which error; may be called again."""
        if self._closing:
            return
        # Under the lock, so that no beat of the thread comes after the last one and hides it.
        with self._beating:
            self._closing = True
        try:
            self._put(Beat(self._count + 1, ENDED, step, error))
        except RuntimeError:
            logger.debug("the store was gone before the last heartbeat", exc_info=True)
        os.write(self._wake_w, b"x")
        self._thread.join(2 * BEAT_S)
        if self._thread.is_alive():  # held up by the store; the process is ending anyway
            return
        for fd in (*self._fds, self._wake_r, self._wake_w):
            os.close(fd)

    def beats(self, ranks: Sequence[int] | None = None) -> dict[int, Beat]:
        """Return the latest heartbeat of every rank, or of some.

        Cost:
            one request to the store, once all hearts have begun to beat.
        """
        ranks = self._ranks if ranks is None else ranks
        if not self._begun:  # reading a key that is not there would wait for it
            self._begun = self._channel.has([f"beat/{rank}" for rank in self._ranks])
        if not self._begun:
            ranks = [rank for rank in ranks if self._channel.has([f"beat/{rank}"])]
        texts = self._channel.read([f"beat/{rank}" for rank in ranks]) if ranks else []
        return {rank: Beat(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}

    def look(self) -> None:
        """Beat, and see whether a step waits for a rank that is gone; called once per second."""
        self._beat()
        at, now_s = self._at(), time.monotonic()
        if at != self._waiting_since[0]:
            # Silence is counted within one wait: while steps go on, nobody is missed.
            self._waiting_since, self._warned = (at, now_s), 0
            self._heard.clear()
            return
        waited_s = now_s - self._waiting_since[1]
        if at[0] in _WAITING_PHASES and waited_s >= WATCH_AFTER_S:
            self._look_for_silence(now_s)
        if at[0] in _WARNED_PHASES:
            self._warn(at, waited_s)

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
                self.look()
                self._cpu_s = time.thread_time()
        except RuntimeError:  # the store is gone: the control thread tells about that
            logger.debug("the liveness thread lost the store", exc_info=True)

    def _beat(self) -> None:
        with self._beating:
            if not self._closing:
                self._count += 1
                self._put(Beat(self._count, *self._at()))

    def _put(self, beat: Beat) -> None:
        self._channel.put(f"beat/{self._channel.rank}", json.dumps(astuple(beat)))

    def _ended(self, peer: Peer) -> None:
        if self._closing:
            return
        last = self.beats([peer.rank]).get(peer.rank)  # the launcher ends us within moments
        # A program that ends in order says so before its process is gone, and is not lost.
        if last is None or last.phase != ENDED:
            self._lost(peer.rank, f"its process {peer.pid} on {peer.host} ended")
        elif last.error:
            self._lost(peer.rank, f"it ended with {last.error}")

    def _warn(self, at: tuple[str, int], waited_s: float) -> None:
        """Name those that a step waits for, after a while and once more before all is over."""
        timeout_s = self._channel.timeout.total_seconds()
        first_s = min(WARN_AFTER_S, 0.5 * timeout_s)
        due = (waited_s >= first_s) + (waited_s >= max(first_s, timeout_s - _BEFORE_TIMEOUT_S))
        if due <= self._warned:
            return
        last, self._warned = due > 1, due
        behind = {r: b for r, b in self.beats().items() if (b.phase, b.step) != at}
        if at[0] == "compute":
            behind = {r: b for r, b in behind.items() if b.phase == "left"}
        if behind:
            over = f"; the process group gives up after {timeout_s:.0f} s" if last else ""
            told = "step %d has waited %.0f s for %s%s"
            logger.log(
                logging.ERROR if last else logging.WARNING,
                *(told, at[1], waited_s, _told(behind), over),
            )

    def _look_for_silence(self, now_s: float) -> None:
        """Take a rank for lost whose heart has stopped while a step may wait for it."""
        if self._silent_s is None or self._closing:
            return
        for rank, beat in self.beats(self._others[: self._watched]).items():
            known, since_s = self._heard.get(rank, (None, now_s))
            self._heard[rank] = (beat, since_s if beat == known else now_s)
            silent_s = now_s - self._heard[rank][1]
            if silent_s >= self._silent_s:
                self._others.remove(rank)  # from now on, the next one's heart is watched
                self._lost(rank, f"no heartbeat for {silent_s:.0f} s, since {beat.where}")
                return


def _told(beats: dict[int, Beat]) -> str:
    return ", ".join(f"rank {r} ({b.where})" for r, b in sorted(beats.items()))


def diagnose(
    liveness: Heartbeats, rank: int, step: int, known: Callable[[], bool]
) -> tuple[int, str] | None:
    """Return which rank broke the collective of ``step`` and how that is known, or ``None``.

    Called by a rank whose own collective failed; watches the others for as long as it takes to tell
    a silent heart from a slow one: `MISSED_S`, or `SILENT_S` where its own heart is slow. ``known``
    tells that the answer has come from elsewhere, so that watching is pointless.
    """
    first, started_s = liveness.beats(), time.monotonic()
    now = first
    while (watched_s := time.monotonic() - started_s) < SILENT_S and not known():
        for other, beat in now.items():
            # One that ended after a later step had done its part in this one.
            if other != rank and beat.phase == ENDED and beat.step <= step:
                return other, f"it ended with {beat.error}" if beat.error else beat.where
        own_beats = now[rank].count - first[rank].count
        if watched_s >= MISSED_S and own_beats >= 2 and (missed := _missed(first, now, rank)):
            return missed
        time.sleep(min(_NAP_S * max(1.0, len(now) / _NAP_RANKS), BEAT_S))
        now = liveness.beats()
    if missed := _missed(first, now, rank):
        return missed
    for other, beat in now.items():
        waits = beat.phase in ("sync", "failed", "decision")
        if other != rank and not waits and beat.step <= step:
            return other, beat.where if beat.phase == "left" else f"still in {beat.where}"
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


def is_of_collectives(error: BaseException | None) -> bool:
    """Return whether an exception is of the kind that the loss of another rank raises.

    With NCCL it may come wherever the program next needs the device, in any phase of a step.
    """
    if error is None or isinstance(error, EvenstrideError):
        return isinstance(error, WorkerLost)
    text = f"{type(error).__name__}: {error}".lower()
    return any(sign in text for sign in _OF_COLLECTIVES)
