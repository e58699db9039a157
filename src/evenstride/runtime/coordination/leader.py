"""The leader's part in an exchange: collect replies, let the core decide, record, and report.

A rank sends a `Reply`, and the leader sends a `Verdict` to all ranks. Both travel as JSON text.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Protocol

import numpy as np

from evenstride.core.allocation.speedup import SplitReference, equal_split
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
from evenstride.core.diagnostics.alerts import Alert
from evenstride.core.diagnostics.ledger import Ledger
from evenstride.core.fleet import FloatArray, Shares
from evenstride.core.gradients.noise_scale import NoiseOfRun, StepParts
from evenstride.core.time_model.observation import Measurements, PeakMemory
from evenstride.errors import SplitDiverged
from evenstride.runtime.coordination.draw_barrier import BatchChange
from evenstride.runtime.coordination.side_agreements import (
    NoticeFilter,
    RankNotices,
    SaveSchedule,
    asked,
    meeting,
)
from evenstride.runtime.engines.replica_groups import Fold, Islands
from evenstride.runtime.sinks.snapshot import LeaderSnapshot
from evenstride.trace.codec import TraceWriter

logger = logging.getLogger("evenstride")

_STANDS_KEPT = 64


@dataclass(frozen=True, slots=True)
class Reply:
    """What one rank replies in an exchange."""

    barrier: int  # first step that the rank has not drawn, and will not draw before the decision
    checksum: int  # of all decisions that the rank has applied.
    # (step, epoch, position) at which the rank's latest passes over the loader began.
    stands: tuple[tuple[int, int, int], ...]
    observations: Measurements  # since the last exchange
    leaving: bool = False  # whether the rank's program is ending
    held: PeakMemory | None = None  # peak memory since the last exchange, if it is known
    notice: RankNotices | None = None  # the rank's preemption notice, if it has one
    norms: tuple[StepParts, ...] = ()  # of its gradients in the steps measured.
    drawn: int = 0  # first step that the rank has not drawn by now
    turn: BatchChange | None = None  # the batch change that the rank waits for, if any


def reply_to_text(reply: Reply) -> str:
    return json.dumps(
        {
            "barrier": reply.barrier,
            "checksum": reply.checksum,
            "stands": reply.stands,
            "observations": _columns(reply.observations),
            "leaving": reply.leaving,
            "held": None if reply.held is None else asdict(reply.held),
            "notice": None if reply.notice is None else asdict(reply.notice),
            "norms": [astuple(parts) for parts in reply.norms],
            "drawn": reply.drawn,
            "turn": None if reply.turn is None else asdict(reply.turn),
        },
        separators=(",", ":"),
        allow_nan=False,  # NaN is not valid JSON
    )


def reply_from_text(text: str) -> Reply:
    plain = json.loads(text)
    return Reply(
        plain["barrier"],
        plain["checksum"],
        tuple(tuple(stand) for stand in plain["stands"]),
        _from_columns(plain["observations"]),
        plain["leaving"],
        None if plain["held"] is None else PeakMemory(**plain["held"]),
        None if plain["notice"] is None else RankNotices(**plain["notice"]),
        tuple(StepParts(*parts) for parts in plain["norms"]),
        plain["drawn"],
        None if plain["turn"] is None else BatchChange(**plain["turn"]),
    )


def _columns(measured: Measurements) -> dict[str, Any]:
    """Return the columns as lists; a time or load that is not finite becomes ``None``."""
    return {
        "worker": measured.worker.tolist(),
        "share": measured.share.tolist(),
        "first_step": measured.first_step.tolist(),
        "steps": measured.steps.tolist(),
        "busy_s": _finite(measured.busy_s),
        "wait_s": _finite(measured.wait_s),
        "sums_s": _finite(measured.sums_s),
        "modelled": measured.modelled.tolist(),
        "loads": _finite(measured.loads),
    }


def _finite(values: FloatArray) -> list[Any]:
    # JSON has no NaN or infinity. An array of objects can hold `None` instead.
    known = values.astype(object)
    known[~np.isfinite(values)] = None
    return list(known.tolist())


def _from_columns(plain: dict[str, Any]) -> Measurements:
    n = len(plain["worker"])
    return Measurements(
        worker=np.array(plain["worker"], dtype=np.int64),
        share=np.array(plain["share"], dtype=np.int64),
        first_step=np.array(plain["first_step"], dtype=np.int64),
        steps=np.array(plain["steps"], dtype=np.int64),
        busy_s=np.array(plain["busy_s"], dtype=np.float64),
        wait_s=np.array(plain["wait_s"], dtype=np.float64),
        sums_s=np.array(plain["sums_s"], dtype=np.float64).reshape(3, n),
        modelled=np.array(plain["modelled"], dtype=np.bool_),
        loads=np.array(plain["loads"], dtype=np.float64).reshape(2, n),
    )


def verdict_to_plain(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON types."""
    # `asdict` would copy the times of every rank one by one.
    return {name: getattr(verdict, name) for name in verdict.__slots__}


def verdict_from_plain(plain: dict[str, Any]) -> Verdict:
    shares = plain["shares"]
    tuples = {name: tuple(plain[name]) for name in ("expected_s", "band", "going")}
    return Verdict(**{**plain, **tuples, "shares": None if shares is None else tuple(shares)})


class Board(Protocol):
    """Shows a run while it continues; see `TelemetryBoard`."""

    def count_from(self, earlier: int) -> None:
        """Add the steps committed before this process to the step count."""
        ...

    def hear(self, kind: str, values: Mapping[str, Any]) -> None:
        """Take a record that the trace gets, other than a decision."""
        ...

    def look(self, known: LeaderSnapshot) -> tuple[Alert, ...]:
        """Return the alerts that an exchange causes, each once."""
        ...

    def tell(self, known: LeaderSnapshot, alerts: tuple[Alert, ...]) -> None:
        """Report what is known, and the alerts."""
        ...

    def close(self) -> None:
        """Report the rest, and end."""
        ...


class Leader:
    """Runs the core on the ranks' replies. Lives on rank 0; only one thread calls it at a time.

    Args:
        control: state of the controller, before any fleet has formed.
        islands: the shard groups, which are then the workers of fleet, ledger and trace; ``None``
            if each rank is a worker.
        lockstep: whether all workers take the same steps.
        bounds: smallest and largest global batch, if it is chosen during the run; else ``None``.
    """

    def __init__(
        self,
        control: Control,
        islands: Islands | None = None,
        *,
        lockstep: bool = True,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        self._lockstep = lockstep
        self.bounds = bounds
        self._control, self._islands = control, islands
        self._fold = None if islands is None else Fold(islands)
        self._writer: TraceWriter | None = None
        self._unwritten: list[tuple[float, Event, Verdict]] = []
        self._started_s = time.perf_counter()
        self._equal: Shares = ()
        self._stands: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.ledger, self._formed = Ledger.empty(0), 0
        self.exchange_at = 0  # step of the leader at which the next exchange is due
        self.changes = 0
        self._began_s = 0.0  # when the replies of the latest exchange had arrived.
        self._took_s: tuple[float, ...] = ()  # time that the latest two exchanges took after that.
        self._compiled = False  # whether the model is compiled for each share
        self.saves: SaveSchedule | None = None  # of rank 0, which knows how long a save takes
        self.noise = NoiseOfRun()  # gradient noise, as far as it is measured
        self._notices = NoticeFilter((), ())
        self.board: Board | None = None
        self._known: LeaderSnapshot | None = None  # what the board has not been shown yet

    @property
    def at_s(self) -> float:
        """Seconds since the leader was created: the clock of its trace."""
        return time.perf_counter() - self._started_s

    @property
    def control(self) -> Control:
        return self._control

    @property
    def islands(self) -> Islands | None:
        return self._islands

    def form(self, event: FleetFormed, places: Sequence[str] = ()) -> Verdict:
        """Form the fleet of all ranks, in rank order, and return the ranks' opening split.

        ``places`` are the machines of the ranks: equal texts for ranks of one machine. Raises a
        `ConfigError` if policy or bounds do not fit this fleet.
        """
        ranks = [worker.name for worker in event.workers]
        if self._islands is not None:
            event = replace(event, workers=self._islands.workers(event.workers))
            ranks = [event.workers[k].name for k in self._islands.places]
        self._notices = NoticeFilter(places or ranks, ranks)
        self.ledger, self._formed = Ledger.empty(len(event.workers)), event.step
        verdict = self._advance(event, at_step=event.step)
        assert self._control.fleet is not None, "it has just been formed"
        self._equal = equal_split(self._control.fleet)
        self._log(verdict)
        return self._for_ranks(verdict)

    def save_with(self, saves: SaveSchedule) -> None:
        """Use the saves of rank 0: how long they take limits what is possible after a notice."""
        self.saves = saves

    def show_on(self, board: Board) -> None:
        """Show the run on a board from now on."""
        self.board = board

    def record_to(self, writer: TraceWriter | None) -> None:
        """Write a trace from now on, including the forming of the fleet."""
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
        """Return the decision for the replies of all ranks.

        Args:
            step: steps that the leader has committed.
            replies: in rank order.
            checksum: of the decisions that the leader has applied itself.
            committed_s: time at which it committed the latest step (`time.perf_counter`), for the
                trace; ``None`` if unknown.
            epoch: epoch of that step; ``None`` if unknown.

        Raises:
            SplitDiverged: a rank has applied other decisions, or iterates over other data.
        """
        self._began_s = time.perf_counter()
        self._prove_agreement(replies, checksum)
        effective = max(reply.barrier for reply in replies)
        met = meeting([reply.turn for reply in replies], [reply.drawn for reply in replies])
        # An epoch is over when all ranks are at its end. So a decision of the epoch includes all of
        # its steps, and takes effect with the first step of the next.
        over = met is not None and all(turn is not None and turn.wanted is None for turn in met)
        seen = self._of_workers(replies)
        event = Exchanged(
            *(step, effective, *seen),
            epoch=epoch,
            epoch_over=over,
            # The shorter one, because a pause of the machine may lengthen either.
            decision_s=min(self._took_s) if len(self._took_s) == 2 else 0.0,
            compiled=self._compiled,
        )
        verdict = self._take(event, replies, committed_s)
        verdict = self._with_turn(verdict, met, step)
        verdict = self._with_departures_and_saves(verdict, replies, step)
        if verdict.shares is not None:
            self.changes += 1
            self._log(verdict)
        return self._for_ranks(verdict)

    def finish_exchange(self) -> None:
        """Report the exchange to alerts and sinks, and note how long it took.

        Call it after the decision was sent, so that no rank waits for it. An error of a sink does
        not end training.
        """
        self._show()
        if not self._control.postponed:  # which takes little time
            self._took_s = (*self._took_s[-1:], time.perf_counter() - self._began_s)

    def take_last(self, step: int, replies: list[Reply], committed_s: float | None) -> None:
        """Take the measurements since the latest exchange, when some rank's run ends.

        The resulting decision is not used, and an error here must not keep a program from ending.
        Ranks that did not reply have empty replies.
        """
        if not any(reply.observations for reply in replies):
            return
        try:
            seen = self._of_workers(replies)
            event = Exchanged(step, step, *seen, last=True, compiled=self._compiled)
            self._take(event, replies, committed_s)
        except Exception:
            logger.exception("the last measurements are missing in the summary and the trace")

    def _take(self, event: Exchanged, replies: list[Reply], committed_s: float | None) -> Verdict:
        """Return the decision for new measurements, and add these to the ledger."""
        verdict = self._advance(event, at_step=event.step, committed_s=committed_s)
        sound = event.observations.only(event.observations.sound)
        if self._lockstep:
            self.ledger = self.ledger.book(sound, self._reference())
        else:
            self.ledger = self.ledger.add_up(sound)
        self._hear_of_noise(replies)
        self._known = self._now_known(event.step, sound)
        return verdict

    def _show(self) -> None:
        """Find the alerts of the latest exchange, and report to the sinks."""
        known, self._known = self._known, None
        if known is None or self.board is None:
            return
        try:
            alerts = self.board.look(known)
            for alert in alerts:
                logger.warning("step %d: %s", alert.step, alert.reason)
                self.note("alert", **alert.to_dict())
            self.board.tell(known, alerts)
        except Exception:
            logger.exception("alerts and metrics of one exchange are missing, because of an error")

    def recall(self, event: Recalled) -> Verdict:
        """Return the ranks' opening split, now that workers are known; no rank has drawn it."""
        verdict = self._advance(event, at_step=event.step)
        self._log(verdict)
        return self._for_ranks(verdict)

    def not_measured(self, step: int, reason: str) -> Verdict:
        """Return the ranks' split when steps cannot be measured; see `NotMeasured`.

        No rank has drawn ``step``. ``reason`` is a clause of a sentence.
        """
        verdict = self._advance(NotMeasured(step, reason), at_step=step)
        self._log(verdict)
        logger.warning(
            "Steps are not measured: %s. Shares stay as they are (%s), and no times are reported",
            reason,
            "/".join(map(str, self._control.rank_shares[:16])),
        )
        return self._for_ranks(verdict)

    def skip_opening(self, step: int) -> None:
        """Stop the opening: no further step waits for a decision."""
        self._advance(OpeningSkipped(step), at_step=step)

    def count_from(self, earlier: int) -> None:
        """Add the steps committed before this process to the board's step count."""
        if self.board is not None:
            self.board.count_from(earlier)

    def expect_slow_firsts(self) -> None:
        """Note that the model is compiled for each share, so the first step at a share is slow."""
        self._compiled = True

    def note(self, kind: str, **values: Any) -> None:
        """Write a record that no decision depends on, and pass it to the board."""
        if self.board is not None:
            self.board.hear(kind, values)
        if self._writer is not None:
            self._writer.record(kind, at_s=round(self.at_s, 6), **values)

    def close(self, summary: dict[str, Any]) -> None:
        """Report the rest, and close the trace and the sinks."""
        self._show()
        if self.board is not None:
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
            formed=self._formed,
            lockstep=self._lockstep,
        )

    def _hear_of_noise(self, replies: list[Reply]) -> None:
        parts_of_ranks = (parts for reply in replies for parts in reply.norms)
        self.noise, whole = self.noise.hear(parts_of_ranks)
        for parts in whole:
            self.note("noise", step=parts.step, **asdict(parts.norms), loss=parts.mean_loss)

    def _with_turn(
        self, verdict: Verdict, met: tuple[BatchChange | None, ...] | None, step: int
    ) -> Verdict:
        """Return the decision, with the next global batch if the ranks wait for a batch change."""
        assert self._control.fleet is not None, "it has formed"
        if met is None:
            return verdict
        present = self._control.fleet.global_batch
        event = asked(met, step, present, self.bounds, self.noise.estimate)
        if event is None:  # the batch in force is the one needed, or a rank has gone on with it
            if verdict.opening and None in met:  # a rank is not where the others expect it
                self.skip_opening(step)
                verdict = replace(verdict, opening=False)
            return replace(verdict, batch=present)
        turned = self._advance(event, at_step=step)
        self._equal = equal_split(self._control.fleet)
        if turned.batch is None:
            logger.info("step %d: %s", step, turned.reason)
            return replace(joined(verdict, turned), batch=present)
        return replace(joined(verdict, turned), reason=f"{turned.why_batch}; {turned.reason}")

    def _with_departures_and_saves(
        self, verdict: Verdict, replies: list[Reply], step: int
    ) -> Verdict:
        """Return the decision, with departures after notices and with requested saves."""
        save_s = self.saves.save_s if self.saves is not None else None
        step_s = max(verdict.expected_s, default=0.0) + self._control.communication_s
        ahead_s = (verdict.effective + 1 - step) * step_s
        notices = [reply.notice for reply in replies]
        news = self._notices.happenings(notices, time.monotonic(), save_s, ahead_s)
        if news:
            event = MembersChanged(step, verdict.effective, news, save_s)
            verdict = joined(verdict, self._advance(event, at_step=step))
            logger.warning("step %d: %s", step, verdict.reason)
            names = self._control.membership.workers
            self._notices.let_go([names[worker] for worker in verdict.going])
        wanted = self.saves.take_wanted() if self.saves is not None else ""
        if wanted and verdict.save_after is None:
            # No rank draws step `effective` before it knows of this decision, so no rank can have
            # committed that step.
            verdict = replace(verdict, save_after=verdict.effective + 1)
        return verdict

    def _advance(self, event: Event, *, at_step: int, committed_s: float | None = None) -> Verdict:
        at_s = self.at_s
        self._control, verdict = advance(self._control, event)
        if self._writer is not None:
            committed_at_s = None if committed_s is None else committed_s - self._started_s
            self._writer.event(at_s, event, verdict, committed_at_s)
        # The fleet forms before the leader knows whether there will be a trace.
        elif isinstance(event, FleetFormed):
            self._unwritten.append((at_s, event, verdict))
        self.exchange_at = at_step + verdict.exchange_after
        return verdict

    def _of_workers(self, replies: list[Reply]) -> tuple[Measurements, tuple[PeakMemory, ...]]:
        measured = [reply.observations for reply in replies]
        memory = tuple(reply.held for reply in replies if reply.held is not None)
        if self._fold is not None and self._islands is not None:
            measured, memory = [self._fold.take(measured)], self._islands.holdings(memory)
        return Measurements.joined(measured), memory

    def _for_ranks(self, verdict: Verdict) -> Verdict:
        if self._fold is None or self._islands is None:
            return verdict
        return replace(
            verdict,
            shares=None if verdict.shares is None else self._islands.spread(verdict.shares),
            expected_s=self._fold.expected(verdict.expected_s),
            band=self._islands.each(verdict.band),
            going=self._islands.ranks_of(verdict.going),
        )

    def _reference(self) -> SplitReference | None:
        fleet, estimate = self._control.fleet, self._control.estimate
        if fleet is None or estimate is None or not estimate.known:
            return None
        if not self._control.roster.all_serve:  # steps with leaving workers are not judged
            return None
        return SplitReference.of(estimate.model, fleet, self._equal)

    def _prove_agreement(self, replies: list[Reply], checksum: int) -> None:
        for rank, reply in enumerate(replies):
            if reply.checksum != checksum:
                raise SplitDiverged(
                    f"rank {rank} has applied other decisions than the leader (checksum "
                    f"{reply.checksum:#x} instead of {checksum:#x}), so the run cannot continue"
                )
            for step, *stand in reply.stands:
                self._prove_stand(rank, step, tuple(stand))
        # Ranks are never far apart, so all ranks have shown the older passes.
        for step in sorted(self._stands)[:-_STANDS_KEPT]:
            del self._stands[step]

    def _prove_stand(self, rank: int, step: int, stand: tuple[int, ...]) -> None:
        """Check that passes that began after the same number of steps began at the same data."""
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


def joined(first: Verdict, then: Verdict) -> Verdict:
    """Return one decision for two that take effect at the same step."""
    return replace(
        then,
        shares=first.shares if then.shares is None else then.shares,
        batch=first.batch if then.batch is None else then.batch,
        reason=f"{first.reason}; {then.reason}",
    )
