"""Exchanges between the ranks, on a background thread of each rank.

Exchange number ``i`` is three messages through the store:

1. A rank wakes the leader (``ask/i``): its own cadence, a draw that waits for a decision, or a
   rank whose times left their tolerance band. The leader wakes all other ranks (``go/i``).
2. Every rank puts up its draw barrier and sends what it measured (``reply/i/RANK``).
3. The leader lets the core decide and sends the decision to all ranks (``verdict/i``), and to each
   rank the times that it expects of this rank (``band/RANK``).

So a rank sends and reads the same number of messages for any number of ranks. Only new shares,
which all ranks need, grow with it.

All waiting happens on the control threads, never on a training thread. With one process there is
no thread: the process sends itself the same messages between two steps.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evenstride.core.control.events import Verdict
from evenstride.core.control.schedule import ToleranceBand
from evenstride.core.fleet import Shares
from evenstride.core.gradients.noise_scale import StepParts
from evenstride.core.time_model.observation import Measurements, PeakMemory
from evenstride.errors import EvenstrideError, WorkerLost, from_plain, to_plain
from evenstride.runtime.coordination.draw_barrier import (
    BarrierReport,
    BatchChange,
    DrawBarrier,
    Position,
)
from evenstride.runtime.coordination.leader import (
    Leader,
    Reply,
    reply_from_text,
    reply_to_text,
    verdict_from_plain,
    verdict_to_plain,
)
from evenstride.runtime.coordination.side_agreements import RankNotices, SaveSchedule
from evenstride.runtime.store.store_channel import Channel, LocalChannel
from evenstride.runtime.timing.recorder import Recorder

logger = logging.getLogger("evenstride")

# How long a program that ends waits for its control thread. For part of that time the thread waits
# for what the other ranks have measured since the previous exchange.
_JOIN_S, _LAST_S, _AGAIN_S = 2.0, 0.5, 0.05

LOST = "lost"
"""The key of the latest report of a loss."""


@dataclass(frozen=True, slots=True)
class Local:
    """The parts of this rank that an exchange reads and changes."""

    gate: DrawBarrier
    recorder: Recorder
    position: Callable[[], Position]
    saves: SaveSchedule
    held: Callable[[], PeakMemory | None] = lambda: None
    notice: Callable[[], RankNotices | None] = lambda: None
    norms: Callable[[], tuple[StepParts, ...]] = lambda: ()

    def reply(self, report: BarrierReport | None) -> Reply:
        """Return this rank's reply in an exchange; without a report, that the rank is leaving."""
        position = self.position()
        if report is None:
            last, norms = self.recorder.take(), self.norms()
            return Reply(0, 0, position.stands, last, leaving=True, norms=norms)
        self.gate.forget_before(position.step - 1)
        return Reply(
            report.barrier,
            report.checksum,
            position.stands,
            self.recorder.take(),
            held=self.held(),
            notice=self.notice(),
            norms=self.norms(),
            drawn=report.drawn,
            turn=report.turn,
        )


def apply(
    verdict: Verdict, rank: int, local: Local, shares: Shares, band: Sequence[float] | None = None
) -> Shares:
    """Put a decision into force on this rank and return the shares that then hold.

    ``band`` is the rank's expected time and the width of its tolerance band, if they did not come
    with the decision.
    """
    after = shares if verdict.shares is None else verdict.shares
    if band is None and verdict.expected_s:
        band = verdict.expected_s[rank], verdict.band[rank]
    if band is not None:
        expected_s, part = band
        local.recorder.expect(ToleranceBand(after[rank], expected_s, part))
    if verdict.save_after is not None:
        local.saves.agreed(verdict.save_after, save=True)
    if verdict.go_after is not None:
        going, why = verdict.going, verdict.why_going
        local.saves.agreed(verdict.go_after, save=False, going=going, why=why)
    # Last, because it releases the training thread, which must find the rest in place.
    local.gate.decide(
        verdict.effective, verdict.shares, opening=verdict.opening, batch=verdict.batch
    )
    return after


class ControlPlane:
    """One rank's part in the exchanges, on a thread if there are other ranks; rank 0's also leads.

    ``shares`` are the opening split, then those in force. ``lost`` is called on this thread when
    other ranks report the loss of a rank.
    """

    def __init__(
        self,
        channel: Channel | LocalChannel,
        local: Local,
        shares: Shares,
        leader: Leader | None,
        lost: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._channel, self._local, self._leader = channel, local, leader
        self.shares, self._lost = shares, lost
        self._exchange = 0
        self._asked = False
        self._closing = False
        self._cpu_s = 0.0
        self._thread: threading.Thread | None = None
        # A single rank waits for no other, so its steps and its trace need no second thread.
        if channel.world_size > 1:
            self._thread = threading.Thread(
                target=self._run, name="evenstride-control", daemon=True
            )
            self._thread.start()

    @property
    def cpu_s(self) -> float:
        """Processor time the control thread has used so far, in seconds."""
        return self._cpu_s

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def exchange(self) -> int:
        """Number of the next exchange, or of the one in progress."""
        return self._exchange

    @property
    def _wake_key(self) -> str:
        return f"{'go' if self._leader is None else 'ask'}/{self._exchange}"

    def ask(self) -> None:
        """Request an exchange; does nothing while one is in progress. Never waits."""
        if self._closing:
            return
        self._channel.put(f"ask/{self._exchange}", "")

    def tick(self, step: int) -> None:
        """On the leader, start an exchange if it is due after ``step`` committed steps."""
        if self._leader is not None and not self._asked and step >= self._leader.exchange_at:
            self._asked = True
            self.ask()
        # A single rank replies here, because a save or a notice may have been requested.
        if self._thread is None and self._channel.present([f"ask/{self._exchange}"])[0]:
            self._one_exchange()

    def begin_with(self, shares: Shares) -> None:
        """Replace the opening split, before the first decision."""
        self.shares = shares

    def turn(self, turn: BatchChange) -> int | None:
        """Wait until the global batch is decided; ``None`` if no more decisions will come."""
        return self._local.gate.turn(turn, self.ask if self._thread else self._answer_now)

    def _answer_now(self) -> None:
        self.ask()
        self._one_exchange()

    def close(self) -> None:
        """Stop the thread; the first rank that closes ends all exchanges. May be called again."""
        if self._closing:
            return
        if self._thread is None:
            # One more, so that the trace and the summary include the latest steps.
            self._local.gate.skip_opening()
            self._answer_now()
        self._closing = True
        # First: in the opening the control thread waits at the barrier for the training thread,
        # which has ended.
        self._local.gate.stop()
        if self._thread is None:
            return
        try:
            self._wake_up(self._thread)
            if self._leader is not None and self.running:
                self._wait_no_longer()
        except RuntimeError:  # the store is gone already, so the thread is ending, too
            logger.debug("the store was gone before the control thread ended", exc_info=True)
        self._thread.join(_JOIN_S)

    def _wake_up(self, thread: threading.Thread) -> None:
        """Make the thread take part in one last exchange."""
        # Repeated, because the thread may finish an exchange and wait for the next number.
        until_s = time.monotonic() + _LAST_S
        while self.running and time.monotonic() < until_s:
            self._channel.put(self._wake_key, "")
            thread.join(_AGAIN_S)

    def _wait_no_longer(self) -> None:
        """Reply for the ranks that do not: they are gone, or still in their last steps."""
        keys = [f"reply/{self._exchange}/{other}" for other in range(1, self._channel.world_size)]
        # The leader waits for every reply without a limit, so a missing one would hang it.
        gone = reply_to_text(Reply(0, 0, (), Measurements.of(()), leaving=True))
        for key, here in zip(keys, self._channel.present(keys), strict=True):
            if not here:
                self._channel.put(key, gone)

    def _run(self) -> None:
        try:
            while self._one_exchange():
                self._cpu_s = time.thread_time()
        except RuntimeError as error:  # torch raises it for every failure of a store
            self._store_failed(error)
        finally:
            self._cpu_s = time.thread_time()
            self._local.gate.stop()

    def _store_failed(self, error: RuntimeError) -> None:
        if self._closing:
            return
        logger.debug("the control thread lost the store", exc_info=error)
        self._local.gate.fail(
            WorkerLost(
                "the store of the process group is gone, because the rank or the launcher that "
                f"hosts it has ended ({error})"
            )
        )

    def _one_exchange(self) -> bool:
        number = self._exchange
        call = self._channel.take(self._wake_key)
        # A wake-up is empty. A text reports the loss of a rank; see `announce_loss`.
        if call:
            return self._hear(json.loads(call))
        if self._thread is not None and self._leader is not None:
            self._channel.put(f"go/{number}", "")
        reply = self._local.reply(self._local.gate.hold(self._batch_change_waits))
        # Ranks that still wait in the opening see this key and reply at once. Otherwise all ranks
        # would wait for each other.
        if reply.turn is not None:
            self._channel.put(f"turn/{number}", "")
        message = self._lead(number, reply) if self._leader else self._follow(number, reply)
        if message is None:
            return False
        # Before the decision releases the training thread, which may request the next exchange.
        self._exchange, self._asked = number + 1, False
        if not self._hear(message):
            return False
        if self._leader is not None:
            # Only now, because all ranks wait for the decision, but none for alerts and sinks.
            self._leader.finish_exchange()
        self._drop(number, reply)
        return True

    def _drop(self, number: int, reply: Reply) -> None:
        """Remove what this rank has put into the store for a finished exchange."""
        if reply.turn is not None:
            self._channel.drop(f"turn/{number}")
        if self._leader is None:
            self._channel.drop(f"reply/{number}/{self._channel.rank}")
        elif number > 0:  # every reply to this exchange proves that the last one is over
            for name in ("ask", "go", "verdict"):
                self._channel.drop(f"{name}/{number - 1}")

    def _batch_change_waits(self) -> bool:
        """Return whether a rank waits for a batch change, and would wait in vain for this rank."""
        return self._channel.present([f"turn/{self._exchange}"])[0]

    def _follow(self, number: int, reply: Reply) -> dict[str, Any] | None:
        self._channel.put(f"reply/{number}/{self._channel.rank}", reply_to_text(reply))
        if reply.leaving:
            # The leader may not have begun this exchange: a leaving rank wakes itself.
            self._channel.put(f"ask/{number}", "")
            return None
        message = dict(json.loads(self._channel.take(f"verdict/{number}")))
        if message.pop("bands", False):
            message["band"] = json.loads(self._channel.take(f"band/{self._channel.rank}"))
        return message

    def _lead(self, number: int, reply: Reply) -> dict[str, Any]:
        assert self._leader is not None, "only rank 0 leads"
        others = range(1, self._channel.world_size)
        texts = self._channel.take_all([f"reply/{number}/{other}" for other in others])
        message = self._judge(reply, texts)
        common, bands = _divided(message)
        if bands and others:
            # First, and under the same keys each time: a rank that has sent its reply has read its
            # band of the exchange before.
            of_others = [json.dumps(band) for band in bands[1:]]
            self._channel.put_all([f"band/{other}" for other in others], of_others)
        self._channel.put(f"verdict/{number}", json.dumps({**common, "bands": bool(bands)}))
        return message

    def _judge(self, mine: Reply, texts: list[str]) -> dict[str, Any]:
        assert self._leader is not None, "only rank 0 judges"
        # The rank that finds a loss replies in the lost rank's place; see `announce_loss`.
        lost = next((text for text in texts if text.startswith('{"lost"')), None)
        if lost is not None:
            return dict(json.loads(lost))
        replies = [mine, *map(reply_from_text, texts)]
        now = self._local.position()
        if any(reply.leaving for reply in replies):
            self._leader.take_last(now.step, replies, now.committed_s)
            return {"closed": True}
        try:
            verdict = self._leader.exchange(
                now.step, replies, mine.checksum, now.committed_s, now.epoch
            )
        except EvenstrideError as error:
            return {"error": to_plain(error)}
        except Exception as error:  # of any type: the other ranks must not wait for ever
            logger.exception("the leader failed to decide")
            return {"error": to_plain(EvenstrideError(f"the leader failed to decide: {error!r}"))}
        return {"verdict": verdict_to_plain(verdict)}

    def _hear(self, message: dict[str, Any]) -> bool:
        """Act on a message of the leader or about a lost rank; return whether to continue."""
        match message:
            case {"verdict": plain}:
                verdict = verdict_from_plain(plain)
                band = message.get("band")
                self.shares = apply(verdict, self._channel.rank, self._local, self.shares, band)
                return True
            case {"error": plain}:
                self._local.gate.fail(from_plain(plain))
            case {"lost": text}:
                self._lost(text)
        return False


def _divided(message: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    """Divide a decision into the part for all ranks, and the band of each rank, if there are any.

    Otherwise every rank would read the expected times of all.
    """
    match message:
        case {"verdict": {"expected_s": [_, *_] as expected_s, "band": band} as plain}:
            common = {**plain, "expected_s": (), "band": ()}
            return {"verdict": common}, list(zip(expected_s, band, strict=True))
    return message, []


def announce_loss(channel: Channel, number: int, rank: int, text: str) -> None:
    """Inform all control threads that a rank is lost, whatever they wait for.

    They may be one exchange apart, so this one and the next are answered. Ranks whose control
    threads have ended find the text under `LOST`.
    """
    message = json.dumps({"lost": text})
    try:
        channel.put(LOST, text)
        for exchange in (number, number + 1):
            for name in ("ask", "go", "verdict"):
                channel.put(f"{name}/{exchange}", message)
            # In the lost rank's place, because the leader waits for its reply.
            channel.put(f"reply/{exchange}/{rank}", message)
    except RuntimeError:  # the store was lost with the rank; every rank notices that by itself
        logger.debug("the loss could not be announced", exc_info=True)
