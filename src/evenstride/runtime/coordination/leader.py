"""The leader's side of an exchange: gather, let the core decide, record, tell."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from evenstride.core.allocation.memory_model import PeakMemory
from evenstride.core.allocation.speedup import Yardstick, equal_split
from evenstride.core.control.advance import advance
from evenstride.core.control.events import (
    Event,
    Exchanged,
    FleetFormed,
    MembersChanged,
    NotMeasured,
    OpeningSkipped,
    Recalled,
    Verdict,
)
from evenstride.core.control.state import Control
from evenstride.core.diagnostics.ledger import Ledger
from evenstride.core.fleet import Shares
from evenstride.core.gradients.noise_accumulator import NoiseOfRun
from evenstride.core.membership.worker_profiles import WorkerProfile
from evenstride.core.time_model.observation import Measurements
from evenstride.errors import SplitDiverged
from evenstride.runtime.coordination.epoch_boundary import asked, meeting
from evenstride.runtime.coordination.messages import Reply, joined
from evenstride.runtime.coordination.notice_filter import NoticeFilter
from evenstride.runtime.coordination.save_schedule import SaveSchedule
from evenstride.runtime.engines.replica_groups import Fold, Islands
from evenstride.runtime.sinks.snapshot import LeaderSnapshot
from evenstride.runtime.sinks.telemetry_board import TelemetryBoard
from evenstride.trace.write import TraceWriter

logger = logging.getLogger("evenstride")

_STANDS_KEPT = 64


class Leader:
    """Runs the core on what the ranks report. Lives on rank 0, called by one thread at a time.

    Args:
        control: the state of the decision path, before any fleet has formed.
        islands: that the ranks are on, which are then the workers of the fleet, of the ledger and
            of the trace; ``None`` if each rank is a worker.
        lockstep: whether all workers take the same steps.
    """

    def __init__(
        self, control: Control, islands: Islands | None = None, *, lockstep: bool = True
    ) -> None:
        self._lockstep = lockstep
        self._control, self._islands = control, islands
        self._fold = None if islands is None else Fold(islands)
        self._writer: TraceWriter | None = None
        self._unwritten: list[tuple[float, Event, Verdict]] = []
        self._started_s = time.perf_counter()
        self._equal: Shares = ()
        self._stands: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.ledger = Ledger.empty(0)
        self.exchange_at = 0  # the leader's own step at which the next exchange is due
        self.changes = 0
        self.saves: SaveSchedule | None = None  # of rank 0, which knows how long a save takes
        self.bounds: tuple[int, int] | None = None  # of a global batch that is chosen here
        self.noise = NoiseOfRun()  # of the gradients, as far as it is measured
        self._desk = NoticeFilter((), ())
        self.board = TelemetryBoard()  # what is shown while the run goes on
        self._known: LeaderSnapshot | None = None  # what it has not been shown yet

    @property
    def at_s(self) -> float:
        """Seconds since the leader was made: the clock of its trace."""
        return time.perf_counter() - self._started_s

    @property
    def control(self) -> Control:
        """The state of the decision path after the latest event."""
        return self._control

    @property
    def islands(self) -> Islands | None:
        """The islands that are the workers of the fleet; ``None`` if each rank is one."""
        return self._islands

    def form(self, event: FleetFormed, places: Sequence[str] = ()) -> Verdict:
        """Form the fleet and return the ranks' opening split.

        Args:
            event: with all ranks as workers, in rank order.
            places: where each rank runs: equal for ranks of one machine.

        Raises:
            ConfigError: the policy or the bounds cannot serve this fleet.
        """
        ranks = [worker.name for worker in event.workers]
        if self._islands is not None:
            event = replace(event, workers=self._islands.workers(event.workers))
            ranks = [event.workers[k].name for k in self._islands.places]
        self._desk = NoticeFilter(places or ranks, ranks)
        self.ledger = Ledger.empty(len(event.workers))
        verdict = self._advance(event, at_step=event.step)
        assert self._control.fleet is not None, "it has just been formed"
        self._equal = equal_split(self._control.fleet)
        self._log(verdict)
        return self._for_ranks(verdict)

    def save_with(self, saves: SaveSchedule) -> None:
        """Take the saves of rank 0 into account, whose length bounds what a notice allows."""
        self.saves = saves

    def show_on(self, board: TelemetryBoard) -> None:
        """Show the run on a board from now on."""
        self.board = board

    def record_to(self, writer: TraceWriter | None) -> None:
        """Keep a trace from now on; the forming of the fleet is written, too."""
        self._writer = writer
        if writer is not None:
            for at_s, event, verdict in self._unwritten:
                writer.event(at_s, event, verdict)
        self._unwritten.clear()

    def exchange(
        self,
        step: int,
        replies: list[Reply],
        checksum: int,
        committed_s: float | None = None,
        epoch: int | None = None,
    ) -> Verdict:
        """Return the verdict on what all ranks replied.

        Args:
            step: steps the leader has committed.
            replies: in rank order.
            checksum: of the decisions the leader has applied itself.
            committed_s: when it committed the latest of the steps (`time.perf_counter`), for the
                trace; ``None`` if that is not known.
            epoch: of the data that the next step belongs to; ``None`` if that is not known.

        Raises:
            SplitDiverged: a rank applied other decisions, or iterates over other data.
        """
        self._prove_agreement(replies, checksum)
        effective = max(reply.barrier for reply in replies)
        event = Exchanged(step, effective, *self._of_workers(replies), epoch=epoch)
        verdict = self._take(event, replies, committed_s)
        verdict = self._with_turn(verdict, replies, step)
        verdict = self._with_members(verdict, replies, step)
        if verdict.shares is not None:
            self.changes += 1
            self._log(verdict)
        return self._for_ranks(verdict)

    def take_last(self, step: int, replies: list[Reply], committed_s: float | None) -> None:
        """Take what was measured since the latest exchange, where the run ends for some rank.

        Nobody goes by what is decided then, and nothing that goes wrong keeps a program from its
        end.

        Args:
            step: steps the leader has committed.
            replies: in rank order; empty ones of those who did not answer.
            committed_s: as in `exchange`.
        """
        if not any(reply.observations for reply in replies):
            return
        try:
            self._take(
                Exchanged(step, step, *self._of_workers(replies), last=True), replies, committed_s
            )
        except Exception:
            logger.exception("what was measured last is left out of the summary and the trace")

    def _take(self, event: Exchanged, replies: list[Reply], committed_s: float | None) -> Verdict:
        """Return the decision on what was measured, which is booked."""
        verdict = self._advance(event, at_step=event.step, committed_s=committed_s)
        sound = event.observations.only(event.observations.sound)
        if self._lockstep:
            self.ledger = self.ledger.book(sound, self._yardstick())
        else:
            self.ledger = self.ledger.add_up(sound)
        self._hear_of_noise(replies)
        self._known = self._now_known(event.step, sound)
        return verdict

    def show(self) -> None:
        """Look for alerts in the latest exchange, and tell the sinks. Call it after the verdict.

        Nobody waits for it then, and nothing that goes wrong in it ends training.
        """
        known, self._known = self._known, None
        if known is None:
            return
        try:
            alerts = self.board.look(known)
            for alert in alerts:
                logger.warning("step %d: %s", alert.step, alert.reason)
                self.note("alert", **alert.to_dict())
            self.board.tell(known, alerts)
        except Exception:
            logger.exception("alerts and metrics failed, and are left out of one exchange")

    def recall(self, step: int, profiles: tuple[WorkerProfile, ...], generation: int) -> Verdict:
        """Return the ranks' opening split, now that workers are known from a checkpoint.

        Args:
            step: steps the leader has committed; no rank has drawn it.
            profiles: of the workers of the generation that saved it.
            generation: that this one is.
        """
        verdict = self._advance(Recalled(step, step, profiles, generation), at_step=step)
        self._log(verdict)
        return self._for_ranks(verdict)

    def not_measured(self, step: int, reason: str) -> Verdict:
        """Return the ranks' split, now that steps cannot be measured; no rank has drawn ``step``.

        Args:
            step: steps the leader has committed.
            reason: why, as a part of a sentence.
        """
        verdict = self._advance(NotMeasured(step, reason), at_step=step)
        self._log(verdict)
        logger.warning(
            "Not measured: %s. Shares stay as they are (%s), and no times are reported",
            reason,
            "/".join(map(str, self._control.rank_shares[:16])),
        )
        return self._for_ranks(verdict)

    def skip_opening(self, step: int) -> None:
        """Let no further step wait for a decision."""
        self._advance(OpeningSkipped(step), at_step=step)

    def note(self, kind: str, **values: Any) -> None:
        """Write a record that no decision depends on, and let the board know of it."""
        self.board.hear(kind, values)
        if self._writer is not None:
            self._writer.record(kind, at_s=round(self.at_s, 6), **values)

    def close(self, summary: dict[str, Any]) -> None:
        """Tell the last of it, and close the trace and the sinks."""
        self.show()
        self.board.close()
        self.note("ended", summary=summary)
        if self._writer is not None:
            self._writer.close()

    def _now_known(self, step: int, sound: Measurements) -> LeaderSnapshot:
        control = self._control
        return LeaderSnapshot(
            step=step,
            control=control,
            measured=control.roster.inward(sound),
            ledger=self.ledger,
            changes=self.changes,
            noise=self.noise,
            lockstep=self._lockstep,
        )

    def _hear_of_noise(self, replies: list[Reply]) -> None:
        told = (parts for reply in replies for parts in reply.norms)
        self.noise, whole = self.noise.hear(told)
        for parts in whole:
            self.note("noise", step=parts.step, **asdict(parts.norms), loss=parts.mean_loss)

    def _with_turn(self, verdict: Verdict, replies: list[Reply], step: int) -> Verdict:
        """Return the verdict with the batch to go on with, if the ranks stand at a turn."""
        assert self._control.fleet is not None, "it has formed"
        met = meeting([reply.turn for reply in replies], [reply.drawn for reply in replies])
        if met is None:
            return verdict
        present = self._control.fleet.global_batch
        event = asked(met, step, present, self.bounds, self.noise.estimate)
        if event is None:  # it is the one that is needed, or somebody has gone on with it
            if verdict.opening and None in met:  # who is not where the others think it is
                self.skip_opening(step)
                verdict = replace(verdict, opening=False)
            return replace(verdict, batch=present)
        turned = self._advance(event, at_step=step)
        self._equal = equal_split(self._control.fleet)
        if turned.batch is None:
            logger.info("step %d: %s", step, turned.reason)
            return replace(joined(verdict, turned), batch=present)
        return replace(joined(verdict, turned), reason=f"{turned.why_batch}; {turned.reason}")

    def _with_members(self, verdict: Verdict, replies: list[Reply], step: int) -> Verdict:
        """Return the verdict with what notices, and wishes to save, add to it."""
        save_s = self.saves.save_s if self.saves is not None else None
        step_s = max(verdict.expected_s, default=0.0) + self._control.communication_s
        ahead_s = (verdict.effective + 1 - step) * step_s
        told = [reply.notice for reply in replies]
        news = self._desk.happenings(told, time.monotonic(), save_s, ahead_s)
        if news:
            event = MembersChanged(step, verdict.effective, news, save_s)
            verdict = joined(verdict, self._advance(event, at_step=step))
            logger.warning("step %d: %s", step, verdict.reason)
            names = self._control.membership.workers
            self._desk.let_go([names[worker] for worker in verdict.going])
        wanted = self.saves.take_wanted() if self.saves is not None else ""
        if wanted and verdict.save_after is None:
            # No rank draws step `effective` before it hears of this, so none can have committed
            # it.
            verdict = replace(verdict, save_after=verdict.effective + 1)
        return verdict

    def _advance(self, event: Event, *, at_step: int, committed_s: float | None = None) -> Verdict:
        at_s = self.at_s
        self._control, verdict = advance(self._control, event)
        if self._writer is not None:
            committed_at_s = None if committed_s is None else committed_s - self._started_s
            self._writer.event(at_s, event, verdict, committed_at_s)
        # The fleet forms before it is known whether there will be a trace.
        elif isinstance(event, FleetFormed):
            self._unwritten.append((at_s, event, verdict))
        self.exchange_at = at_step + verdict.exchange_after
        return verdict

    def _of_workers(self, replies: list[Reply]) -> tuple[Measurements, tuple[PeakMemory, ...]]:
        """Return what the workers measured and held, given the replies of the ranks."""
        told = [reply.observations for reply in replies]
        memory = tuple(reply.held for reply in replies if reply.held is not None)
        if self._fold is not None and self._islands is not None:
            told, memory = [self._fold.take(told)], self._islands.holdings(memory)
        return Measurements.joined(told), memory

    def _for_ranks(self, verdict: Verdict) -> Verdict:
        """Return what a verdict about the workers means for the ranks."""
        if self._fold is None or self._islands is None:
            return verdict
        return replace(
            verdict,
            shares=None if verdict.shares is None else self._islands.spread(verdict.shares),
            expected_s=self._fold.expected(verdict.expected_s),
            band=self._islands.each(verdict.band),
            going=self._islands.ranks_of(verdict.going),
        )

    def _yardstick(self) -> Yardstick | None:
        fleet, estimate = self._control.fleet, self._control.estimate
        if fleet is None or estimate is None or not estimate.known:
            return None
        if not self._control.roster.all_serve:  # the steps of those who leave are not judged
            return None
        return Yardstick.of(estimate.model, fleet, self._equal)

    def _prove_agreement(self, replies: list[Reply], checksum: int) -> None:
        for rank, reply in enumerate(replies):
            if reply.checksum != checksum:
                raise SplitDiverged(
                    f"rank {rank} has applied other decisions than the leader (checksum "
                    f"{reply.checksum:#x} instead of {checksum:#x}); the run cannot go on"
                )
            for step, *stand in reply.stands:
                self._prove_stand(rank, step, tuple(stand))
        # Ranks are never far apart, so what was long ago has been compared.
        for step in sorted(self._stands)[:-_STANDS_KEPT]:
            del self._stands[step]

    def _prove_stand(self, rank: int, step: int, stand: tuple[int, ...]) -> None:
        """Whoever began a loop after the same number of steps must have begun at the same data."""
        first, expected = self._stands.setdefault(step, (rank, stand))
        if stand != expected:
            raise SplitDiverged(
                f"after {step} steps rank {rank} began a loop at epoch {stand[0]}, position "
                f"{stand[1]}, but rank {first} at epoch {expected[0]}, position {expected[1]}; "
                "load the same state on every rank and leave the loop at the same step"
            )

    def _log(self, verdict: Verdict) -> None:
        if verdict.shares is not None:
            shown = verdict.shares if len(verdict.shares) <= 16 else (*verdict.shares[:16], "...")
            logger.info(
                "step %d: shares %s (%s)",
                verdict.effective,
                "/".join(map(str, shown)),
                verdict.reason,
            )
