"""Detect the loss of another rank, and name that rank before this process ends as well.

If a rank dies, its connections close. The collective of the other ranks soon fails with an error
that names no rank. If a rank hangs, the others wait for the whole timeout of the process group.
Three sources identify the lost rank:

* On the same machine, the kernel reports the end of a process at once.
* Each rank writes a heartbeat to the store every second. It says what the training thread does.
* The last heartbeat of a program says that the program ends, and with which error, if any.

The rank that detects the loss first reports it to the others through the store.

No cost of a rank grows with the number of ranks, because their sum would grow with its square. Each
rank watches the heartbeat of the next rank only, in a ring, so waiting costs the store one request
per rank and second. If that heartbeat stops, the rank watches the one after it. Where all
heartbeats are needed, the first few ranks that need them read them, and report to the others.
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

# Characters of an error that the other ranks receive: our errors end with what to change.
_MOST_TEXT = 700

BEAT_S = 1.0
# A rank without a heartbeat for this time is lost.
SILENT_S = 3.5
# This shorter time suffices if this rank itself beat twice meanwhile: its own machine is then not
# slow. It is short because launchers wait for the processes that diagnose a loss.
MISSED_S = 2.25
# A step that waits for another rank for this time logs a warning that names the rank.
WARN_AFTER_S = 30.0
# A step that waits for this time starts to watch the heartbeats of other ranks.
WATCH_AFTER_S = 3.0
# Phases in which a rank may wait for others in a call that cannot be interrupted. "compute" is one
# because sharded models communicate in forward and backward passes. The other waits can be ended.
STUCK_PHASES = ("sync", "compute")
_WAITING_PHASES = (*STUCK_PHASES, "decision", "turn", "agreement")
# Phases in which a long wait is worth a warning. A rank in "compute" may be busy or may wait in a
# collective of its model, so it names only ranks that left the loop.
_WARNED_PHASES = ("sync", "decision", "turn", "compute")
_WORDS = {
    "agreement": "waiting for the other ranks in step {}",
    "decision": "waiting for the shares of step {}",
    "left": "it left the training loop in step {}; all ranks must leave it after the same step",
}
# The second warning comes this long before the timeout of the process group: at the timeout, NCCL
# ends the process, and no code of ours runs any more.
_BEFORE_TIMEOUT_S = 10.0
# The phase of a rank whose program has ended.
ENDED = "ended"
# A rank whose collective failed looks again at this interval, and less often with more ranks than
# this.
_NAP_S, _NAP_RANKS = 0.1, 32
# Ranks that read the heartbeats of all when all ranks need them. Several, because one may end.
_READERS = 8
# Ranks that a warning names.
_MOST_NAMES = 8

# Text in an error which shows that a collective failed, and not the user's own code.
_OF_COLLECTIVES = ("gloo", "nccl", "connection", "socket", "timed out", "timeout", "peer")


@dataclass(frozen=True, slots=True)
class Beat:
    """One rank's heartbeat."""

    count: int  # number of heartbeats so far
    phase: str  # of its training thread; `ENDED` once its program has ended
    step: int  # in which the thread is
    error: str | None = None  # error that ended its program, if any

    @property
    def where(self) -> str:
        """The rank's phase and step, as text."""
        if self.phase == ENDED:
            return "its program ended early"
        if self.step < 0:
            return "before its first step"
        return _WORDS.get(self.phase, f"{self.phase} of step {{}}").format(self.step)

    @property
    def steps(self) -> float:
        """Steps that the rank is known to have finished or begun to synchronise."""
        if self.phase == ENDED:
            return math.inf
        return self.step + (self.phase in ("sync", "between"))


class Heartbeats:
    """The heartbeat thread of one rank.

    Args:
        channel: Connection to the other ranks.
        peers: Processes of all ranks, in rank order.
        at: Returns the phase and the step of the training thread.
        lost: Called on this thread with a lost rank and a sentence on how the loss was detected.
        silent_s: Time without a heartbeat, while a step waits, after which a rank is lost.
            ``None`` waits for ever, for runs without a launcher that restarts the ranks.
        ring: Whether to watch the next rank only. This suffices where all ranks wait for a lost
            one. Elsewhere rank 0 watches all others while some rank waits, and they watch rank 0.
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
        self._ranks = ranks = [peer.rank for peer in peers]
        self._begun = set[int]()  # ranks that have sent a heartbeat
        mine = channel.rank
        # In the order in which they are watched. The leader watches all others where there is no
        # ring; the others can then watch the leader only, without which no run continues.
        self._others = [*(r for r in ranks if r > mine), *(r for r in ranks if r < mine)]
        self._leads = not ring and mine == 0
        if not ring and mine:
            self._others = [0]
        self._heard: dict[int, tuple[Beat, float]] = {}
        # Since when each rank is at one place, and when its last heartbeat was new.
        self._places: dict[int, tuple[Beat, float, float]] = {}
        self._claim = ""  # the key under which this rank claimed to read for all
        self._count, self._cpu_s = 0, 0.0
        self._closing, self._beating = False, threading.Lock()
        self._waiting_since: tuple[tuple[str, int], float] = (("idle", -1), time.monotonic())
        self._warned = 0  # warnings of the present wait
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
        """Send the last heartbeat, with the step and the error, and stop. Idempotent."""
        if self._closing:
            return
        # The lock keeps the thread from overwriting the last heartbeat with a later one.
        with self._beating:
            self._closing = True
        try:
            self._put(Beat(self._count + 1, ENDED, step, error))
        except RuntimeError:
            logger.debug("the store was gone before the last heartbeat", exc_info=True)
        os.write(self._wake_w, b"x")
        self._thread.join(2 * BEAT_S)
        if self._thread.is_alive():  # blocked by the store; the process is ending anyway
            return
        for fd in (*self._fds, self._wake_r, self._wake_w):
            os.close(fd)

    def beats(self, ranks: Sequence[int] | None = None) -> dict[int, Beat]:
        """Return the latest heartbeats of the given ranks, of all ranks by default.

        Cost:
            One request to the store, once these ranks have sent a heartbeat.
        """
        ranks = self._ranks if ranks is None else ranks
        new = [rank for rank in ranks if rank not in self._begun]
        # Reading a missing key would wait for it.
        if new and self._channel.has([f"beat/{rank}" for rank in new]):
            self._begun.update(new)
        elif new:
            self._begun.update(rank for rank in new if self._channel.has([f"beat/{rank}"]))
            ranks = [rank for rank in ranks if rank in self._begun]
        texts = self._channel.read([f"beat/{rank}" for rank in ranks]) if ranks else []
        return {rank: Beat(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}

    def reads_all(self, occasion: str) -> bool:
        """Return whether this rank reads all heartbeats on this occasion, on behalf of all ranks.

        The first `_READERS` ranks that ask do.
        """
        if len(self._ranks) <= _READERS:
            return True
        self._forget_claim()
        key = f"reads/{occasion}"
        if self._channel.count(key) > _READERS:
            return False
        self._claim = key
        return True

    def _forget_claim(self) -> None:
        if self._claim:
            self._channel.uncount(self._claim)
            self._claim = ""

    def look(self) -> None:
        """Send a heartbeat, and check whether a step waits for a lost rank. Runs every second."""
        self._beat()
        at, now_s = self._at(), time.monotonic()
        if self._leads:
            self._look_for_all(now_s)
        if at != self._waiting_since[0]:
            # Within a step, other ranks may still ask who reads: the phase of a rank whose
            # collective failed changes, too.
            if at[1] != self._waiting_since[0][1]:
                self._forget_claim()
            # Silence counts within one wait only: while steps proceed, no rank is missing.
            self._waiting_since, self._warned = (at, now_s), 0
            if not self._leads:
                self._heard.clear()
            return
        waited_s = now_s - self._waiting_since[1]
        waits = at[0] in _WAITING_PHASES and waited_s >= WATCH_AFTER_S
        if waits and not self._leads and self._watches:
            self._look_for_silence(self.beats(self._others[:1]), now_s)
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
        except RuntimeError:  # the store is gone; the control thread reports that
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
        # A program that ends normally sends its last heartbeat before its process ends.
        last = self.beats([peer.rank]).get(peer.rank)
        if last is None or last.phase != ENDED:
            self._lost(peer.rank, f"its process {peer.pid} on {peer.host} ended")
        elif last.error:
            self._lost(peer.rank, f"it ended with {last.error}")

    def _warn(self, at: tuple[str, int], waited_s: float) -> None:
        """Log the ranks that a step waits for: after a while, and again before the timeout."""
        timeout_s = self._channel.timeout.total_seconds()
        first_s = min(WARN_AFTER_S, 0.5 * timeout_s)
        due = (waited_s >= first_s) + (waited_s >= max(first_s, timeout_s - _BEFORE_TIMEOUT_S))
        if due <= self._warned:
            return
        last, self._warned = due > 1, due
        if not self.reads_all(f"{at[0]}/{at[1]}/{due}"):
            return
        behind = {r: b for r, b in self.beats().items() if (b.phase, b.step) != at}
        if at[0] == "compute":
            behind = {r: b for r, b in behind.items() if b.phase == "left"}
        if behind:
            over = f"; the process group times out after {timeout_s:.0f} s" if last else ""
            level = logging.ERROR if last else logging.WARNING
            names = _names(behind)
            logger.log(level, "step %d has waited %.0f s for %s%s", at[1], waited_s, names, over)

    @property
    def _watches(self) -> bool:
        return self._silent_s is not None and not self._closing

    def _look_for_all(self, now_s: float) -> None:
        """On the leader, look for lost ranks if any rank waits, which the others cannot know."""
        if not self._watches:
            return
        beats = self.beats([self._channel.rank, *self._others])
        waits = False
        for rank, beat in beats.items():
            before, since_s, beat_s = self._places.get(rank, (None, now_s, now_s))
            stays = before is not None and (before.phase, before.step) == (beat.phase, beat.step)
            beat_s = beat_s if before == beat else now_s
            self._places[rank] = (beat, since_s if stays else now_s, beat_s)
            # A rank whose heartbeat has stopped does not wait. A busy rank's may miss some looks.
            alive = now_s - beat_s < SILENT_S
            long = stays and now_s - since_s >= WATCH_AFTER_S
            waits |= alive and long and beat.phase in _WAITING_PHASES
        if waits:
            beats.pop(self._channel.rank, None)
            self._look_for_silence(beats, now_s)
        else:
            self._heard.clear()

    def _look_for_silence(self, beats: dict[int, Beat], now_s: float) -> None:
        """Report a rank as lost if its heartbeat stopped while a step may wait for it."""
        assert self._silent_s is not None, "only ranks that watch look"
        for rank, beat in beats.items():
            known, since_s = self._heard.get(rank, (None, now_s))
            self._heard[rank] = (beat, since_s if beat == known else now_s)
            silent_s = now_s - self._heard[rank][1]
            if silent_s >= self._silent_s:
                self._others.remove(rank)  # from now on, watch the next rank
                self._lost(rank, f"no heartbeat for {silent_s:.0f} s, since {beat.where}")
                return


def _names(beats: dict[int, Beat]) -> str:
    named = [f"rank {r} ({b.where})" for r, b in sorted(beats.items())[:_MOST_NAMES]]
    more = len(beats) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def diagnose(
    liveness: Heartbeats, rank: int, step: int, known: Callable[[], bool]
) -> tuple[int, str] | None:
    """Return the rank that broke the collective of ``step`` and the evidence, or ``None``.

    A rank calls this when its own collective failed. It watches the other heartbeats for
    `MISSED_S`, or for `SILENT_S` if its own heartbeat is slow. It stops early once ``known``
    returns true, when another rank has reported the loss. With many ranks, the first ones that call
    this watch, and the others wait for their report.
    """
    if not liveness.reads_all(f"failed/{step}"):
        _await_report(known)
        return None
    first, started_s = liveness.beats(), time.monotonic()
    now = first
    while (watched_s := time.monotonic() - started_s) < SILENT_S and not known():
        for other, beat in now.items():
            # A rank that ended in a later step completed this one.
            if other != rank and beat.phase == ENDED and beat.step <= step:
                return other, f"it ended with {beat.error}" if beat.error else beat.where
        own_beats = now[rank].count - first[rank].count
        if watched_s >= MISSED_S and own_beats >= 2 and (missed := _missed(first, now, rank)):
            return missed
        time.sleep(_nap_s(len(now)))
        now = liveness.beats()
    if missed := _missed(first, now, rank):
        return missed
    for other, beat in now.items():
        waits = beat.phase in ("sync", "failed", "decision")
        if other != rank and not waits and beat.step <= step:
            return other, beat.where if beat.phase == "left" else f"still in {beat.where}"
    return None


def _await_report(known: Callable[[], bool]) -> None:
    """Wait until a loss is known, for a little longer than the ranks that look for it."""
    started_s = time.monotonic()
    while not known() and time.monotonic() - started_s < SILENT_S + 2 * BEAT_S:
        time.sleep(BEAT_S / 2)


def _nap_s(ranks: int) -> float:
    return min(_NAP_S * max(1.0, ranks / _NAP_RANKS), BEAT_S)


def _missed(first: dict[int, Beat], now: dict[int, Beat], rank: int) -> tuple[int, str] | None:
    """Return another rank that sent no heartbeat between the two readings."""
    for other, beat in now.items():
        if other != rank and first.get(other) == beat:
            return other, f"no heartbeat since {beat.where}"
    return None


def ending_exception() -> BaseException | None:
    """Return the uncaught exception that ends this program, if any."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


def ending_error() -> str | None:
    """Return the uncaught exception that ends this program as one line, if any.

    A keyboard interrupt reaches all ranks and is not reported.
    """
    error = ending_exception()
    if error is None or isinstance(error, KeyboardInterrupt):
        return None
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_MOST_TEXT]}"


def is_of_collectives(error: BaseException | None) -> bool:
    """Return whether the loss of another rank may have caused an exception.

    With NCCL the exception may come in any phase of a step, at the next use of the device.
    """
    if error is None or isinstance(error, EvenstrideError):
        return isinstance(error, WorkerLost)
    text = f"{type(error).__name__}: {error}".lower()
    return any(sign in text for sign in _OF_COLLECTIVES)
