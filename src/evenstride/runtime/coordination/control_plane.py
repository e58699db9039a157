"""Exchanges between the ranks, on a background thread of each; of one rank alone, on its own.

One exchange, number ``i``, is three messages through the store:

1. somebody wakes the leader (``go/i/0``): its own cadence, a draw that waits for a decision, or
   a rank whose times left their band; the leader wakes everyone (``go/i/RANK``);
2. every rank puts up its barrier and replies (``told/i/RANK``) with what it measured;
3. the leader lets the core decide and tells everyone (``verdict/i``).

All waiting happens here, on the control threads; training never takes part. A rank alone sends
the same messages to itself, between two steps.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
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

# How long a program that ends waits for its control thread; and for how long of that this thread
# waits for what the others have measured since the exchange before.
_JOIN_S, _LAST_S, _AGAIN_S = 2.0, 0.5, 0.05


@dataclass(frozen=True, slots=True)
class Local:
    """This rank's own parts that an exchange reads and moves."""

    gate: DrawBarrier
    recorder: Recorder
    position: Callable[[], Position]
    saves: SaveSchedule
    held: Callable[[], PeakMemory | None] = lambda: None
    notice: Callable[[], RankNotices | None] = lambda: None
    norms: Callable[[], tuple[StepParts, ...]] = lambda: ()

    def reply(self, report: BarrierReport | None) -> Reply:
        """Return what this rank answers in an exchange; without a report, that it is leaving."""
        position = self.position()
        if report is None:
            told, norms = self.recorder.take(), self.norms()
            return Reply(0, 0, position.stands, told, leaving=True, norms=norms)
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


def apply(verdict: Verdict, rank: int, local: Local, shares: Shares) -> Shares:
    """Put a verdict in force on this rank and return the shares it leaves in force."""
    after = shares if verdict.shares is None else verdict.shares
    if verdict.expected_s:
        local.recorder.expect(
            ToleranceBand(after[rank], verdict.expected_s[rank], verdict.band[rank])
        )
    if verdict.save_after is not None:
        local.saves.agreed(verdict.save_after, save=True)
    if verdict.go_after is not None:
        going, why = verdict.going, verdict.why_going
        local.saves.agreed(verdict.go_after, save=False, going=going, why=why)
    # Last, as it lets the training thread go on, which must find the rest in place.
    local.gate.decide(
        verdict.effective, verdict.shares, opening=verdict.opening, batch=verdict.batch
    )
    return after


class ControlPlane:
    """One rank's part in the exchanges, on a thread if there are others; rank 0's also leads.

    ``shares`` are the opening split, then those in force. ``lost`` is called on this thread when
    other ranks report that one is gone.
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
        # A rank alone waits for nobody, so its steps and its trace need no second thread.
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
        """Number of the exchange that comes next, or is going on."""
        return self._exchange

    def ask(self) -> None:
        """Ask for an exchange now; does nothing while one is going on. Never waits."""
        if self._closing:
            return
        self._channel.put(f"go/{self._exchange}/0", "")

    def tick(self, step: int) -> None:
        """On the leader, start the exchange that is due once ``step`` steps are committed."""
        if self._leader is not None and not self._asked and step >= self._leader.exchange_at:
            self._asked = True
            self.ask()
        # A rank alone answers here, as it may have been asked for a save or for a notice.
        if self._thread is None and self._channel.present([f"go/{self._exchange}/0"])[0]:
            self._one_exchange()

    def begin_with(self, shares: Shares) -> None:
        """Take another opening split for the first one, before any decision has come."""
        self.shares = shares

    def turn(self, turn: BatchChange) -> int | None:
        """Stand still until the batch is decided; ``None`` if no more decisions will come."""
        return self._local.gate.turn(turn, self.ask if self._thread else self._answer_now)

    def _answer_now(self) -> None:
        self.ask()
        self._one_exchange()

    def close(self) -> None:
        """End the thread; the first rank that closes ends all exchanges. May be called again."""
        if self._closing:
            return
        if self._thread is None:
            # Once more, so that the trace and the summary hold the latest steps as well.
            self._local.gate.skip_opening()
            self._answer_now()
        self._closing = True
        # First: in the opening the control thread waits at the gate for training, which is over
        # now.
        self._local.gate.stop()
        if self._thread is None:
            return
        try:
            self._wake_up(self._thread)
            if self._leader is not None and self.running:
                self._wait_no_longer()
        except RuntimeError:  # the store is gone already; then the thread is ending, too
            logger.debug("the store was gone before the control thread ended", exc_info=True)
        self._thread.join(_JOIN_S)

    def _wake_up(self, thread: threading.Thread) -> None:
        """Let the thread take part in one more exchange, the last, wherever it stands."""
        # Repeated, since the thread may end an exchange meanwhile and wait for the next number.
        until_s = time.monotonic() + _LAST_S
        while self.running and time.monotonic() < until_s:
            self._channel.put(f"go/{self._exchange}/{self._channel.rank}", "")
            thread.join(_AGAIN_S)

    def _wait_no_longer(self) -> None:
        """Answer for those who do not: they are gone, or still at their last steps."""
        told = [f"told/{self._exchange}/{other}" for other in range(1, self._channel.world_size)]
        # The leader waits for every reply without a limit, so one that never comes would hang it.
        gone = reply_to_text(Reply(0, 0, (), Measurements.of(()), leaving=True))
        for key, here in zip(told, self._channel.present(told), strict=True):
            if not here:
                self._channel.put(key, gone)

    def _run(self) -> None:
        try:
            while self._one_exchange():
                self._cpu_s = time.thread_time()
        except RuntimeError as error:  # torch raises it for everything that befalls a store
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
                "the store of the process group is gone, and with it the rank or the launcher "
                f"that hosts it ({error})"
            )
        )

    def _one_exchange(self) -> bool:
        """Take part in one exchange; return whether another may follow."""
        number = self._exchange
        call = self._channel.take(f"go/{number}/{self._channel.rank}")
        # A wake-up is empty. A text is the news of a loss; see `announce_loss`.
        if call:
            return self._hear(json.loads(call))
        if self._leader is not None:
            for other in range(1, self._channel.world_size):
                self._channel.put(f"go/{number}/{other}", "")
        reply = self._local.reply(self._local.gate.hold(self._somebody_turns))
        # Ranks that still hold for the opening look for this and reply at once, or all would wait
        # for each other.
        if reply.turn is not None:
            self._channel.put(f"turn/{number}", "")
        message = self._lead(number, reply) if self._leader else self._follow(number, reply)
        if message is None:
            return False
        # Before the verdict lets the training thread go on: it may ask for the next exchange.
        self._exchange, self._asked = number + 1, False
        if not self._hear(message):
            return False
        if self._leader is not None:
            # Only now, as all ranks wait for the verdict, and none for alerts and sinks.
            self._leader.show()
        self._drop(number, reply)
        return True

    def _drop(self, number: int, reply: Reply) -> None:
        """Remove what this rank has left in the store for an exchange that is over."""
        self._channel.drop(f"go/{number}/{self._channel.rank}")
        if reply.turn is not None:
            self._channel.drop(f"turn/{number}")
        if self._leader is None:
            self._channel.drop(f"told/{number}/{self._channel.rank}")
        elif number > 0:  # every reply to this exchange proves that the last verdict was read
            self._channel.drop(f"verdict/{number - 1}")

    def _somebody_turns(self) -> bool:
        """Return whether a rank stands at a turn, and this one may wait for it in vain."""
        return self._channel.present([f"turn/{self._exchange}"])[0]

    def _follow(self, number: int, reply: Reply) -> dict[str, Any] | None:
        self._channel.put(f"told/{number}/{self._channel.rank}", reply_to_text(reply))
        if reply.leaving:
            # The leader may not have begun this exchange: a rank that leaves was woken by itself.
            self._channel.put(f"go/{number}/0", "")
            return None
        return dict(json.loads(self._channel.take(f"verdict/{number}")))

    def _lead(self, number: int, reply: Reply) -> dict[str, Any]:
        assert self._leader is not None, "only rank 0 leads"
        keys = [f"told/{number}/{other}" for other in range(1, self._channel.world_size)]
        message = self._judge(reply, self._channel.take_all(keys))
        self._channel.put(f"verdict/{number}", json.dumps(message))
        return message

    def _judge(self, mine: Reply, texts: list[str]) -> dict[str, Any]:
        assert self._leader is not None, "only rank 0 judges"
        # Who finds a loss replies in the lost rank's place; see `announce_loss`.
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
        except Exception as error:  # whatever it is, the other ranks must not wait for ever
            logger.exception("the leader could not decide")
            return {"error": to_plain(EvenstrideError(f"the leader could not decide: {error!r}"))}
        return {"verdict": verdict_to_plain(verdict)}

    def _hear(self, message: dict[str, Any]) -> bool:
        """Act on a message from the leader or about a lost rank; return whether to go on."""
        match message:
            case {"verdict": plain}:
                verdict = verdict_from_plain(plain)
                self.shares = apply(verdict, self._channel.rank, self._local, self.shares)
                return True
            case {"error": plain}:
                self._local.gate.fail(from_plain(plain))
            case {"lost": text}:
                self._lost(text)
        return False


def announce_loss(channel: Channel, number: int, rank: int, text: str) -> None:
    """Tell all control threads that a rank is gone, whatever they are waiting for.

    They may be one exchange apart, so this one and the next are answered.
    """
    message = json.dumps({"lost": text})
    try:
        for exchange in (number, number + 1):
            for other in range(channel.world_size):
                channel.put(f"go/{exchange}/{other}", message)
            # In the lost rank's place, because the leader waits for its reply.
            channel.put(f"told/{exchange}/{rank}", message)
            channel.put(f"verdict/{exchange}", message)
    except RuntimeError:  # the store went with the rank; its end is plain to all then
        logger.debug("the loss could not be announced", exc_info=True)
