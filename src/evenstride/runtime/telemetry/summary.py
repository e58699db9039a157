"""What a run came to, in numbers and in plain sentences."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from evenstride.core.control.state import Control
from evenstride.core.diagnostics.ledger import Ledger
from evenstride.core.formatting import time_text
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.noise.noise_meter import NoiseSummary

# Workers whose memory is told of one by one.
_MOST_CAPS = 8


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """One worker's part of a run; seconds are totals over all reported steps.

    A worker is a rank, or an island of ranks that shard one replica. An island is busy while its
    slowest rank is, and waits for other islands.

    Args:
        name: host and rank, or the ranks of an island: ``host/0-3``.
        share: samples per step at the end, of all ranks of an island.
        busy_s: at work.
        waited_s: waiting for slower workers.
        caused_s: waiting of others because this one was the slowest.
        slowest_steps: steps in which it was the slowest.
        data_s: of the busy time, spent waiting for data.
        outside_s: outside training (evaluation, saving) beyond the usual.
        refused: reports of impossible times or shares, from which nothing was learned.
        cap: most samples that its memory is predicted to hold; ``None`` if unknown.
        memory: what its memory was learned to hold, as a sentence; empty if unknown.
    """

    name: str
    share: int
    busy_s: float
    waited_s: float
    caused_s: float
    slowest_steps: int
    data_s: float
    outside_s: float
    refused: int = 0
    cap: int | None = None
    memory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run so far, as the leader knows it; ``str()`` gives sentences.

    Figures that rest on the fitted curves rather than on splits that were run end in
    ``_model``; each step is judged by the curves as they were fitted then. They are ``None``
    until every worker has been measured.

    Args:
        rank: the rank that made the summary; only rank 0's is complete.
        epoch: current epoch.
        step: steps committed by this process.
        global_batch: samples per step.
        policy: its specification.
        workers: in rank order; islands in order of their lowest rank.
        changes: changes of the shares after the opening split.
        step_s: mean time of a step: own work of its slowest worker, and the communication.
        efficiency_model: the best split's time over the time taken; 1 is perfect.
        speedup_model: the equal split's time over the time taken.
        bound_model: the equal split's time over the best split's.
        samples_dropped: samples that ``drop_last`` leaves out of every epoch.
        overhead_s: our own time per step on the training thread, and of our threads.
        by_epoch: whether ranks keep to parts of the data set for an epoch.
        shards: of the data, where each rank reads its own in a row; 0 for other data.
        batches_repeated: how often a batch of this rank did not fit into memory and came again.
        fits: most samples of this rank's batches since then.
        drift_checks: comparisons of the ranks' weights.
        drifts: how often they differed, and rank 0's were broadcast.
        sync: mode of synchronisation.
        forgoes: what that mode does not promise, in sentences.
        staleness: of the updates, where workers do not keep step: ``count``, ``mean``, ``maximum``
            and ``histogram``, the same of each of the ``workers``, ``most_ahead`` and
            ``handed_out_again``; see
            `evenstride.runtime.parameter_server.work_dispatcher.WorkDispatcher.report`.
        noise: of the gradient, where it is measured; see `NoiseSummary`.
        not_measured: why steps could not be measured, so that no time is known; empty if they were.
    """

    rank: int
    epoch: int
    step: int
    global_batch: int
    policy: str
    workers: tuple[WorkerSummary, ...] = ()
    changes: int = 0
    step_s: float | None = None
    efficiency_model: float | None = None
    speedup_model: float | None = None
    bound_model: float | None = None
    samples_dropped: int
    overhead_s: float
    by_epoch: bool = False
    shards: int = 0
    batches_repeated: int = 0
    fits: int | None = None
    drift_checks: int = 0
    drifts: int = 0
    sync: str = "bsp"
    forgoes: tuple[str, ...] = ()
    staleness: dict[str, Any] | None = None
    noise: NoiseSummary | None = None
    not_measured: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [self._begins()]
        if not self.workers:
            lines.append(f"rank {self.rank} knows only itself; rank 0's summary is complete")
        if self.not_measured:
            lines.append(self._unmeasured())
        elif self.step_s is not None:
            lines.append(self._speed())
        lines += self._waits()
        lines += [
            f"worker {worker.name} reported what cannot be {worker.refused} time(s); nothing was "
            "learned from that"
            for worker in self.workers
            if worker.refused
        ]
        lines += [
            f"worker {worker.name} may hold {worker.cap} samples at most: {worker.memory}"
            for worker in self.workers
            if worker.cap is not None and worker.cap < self.global_batch
        ][:_MOST_CAPS]
        lines += self._order()
        lines += [f"sync {self.sync}: {sentence}" for sentence in self.forgoes]
        if self.staleness:
            lines.append(_stale(self.staleness))
        if self.batches_repeated:
            lines.append(
                f"memory ended {self.batches_repeated} time(s) on rank {self.rank}, whose batches "
                f"have at most {self.fits} samples since"
            )
        if self.samples_dropped:
            lines.append(f"drop_last leaves {self.samples_dropped} samples out of every epoch")
        if self.drift_checks:
            lines.append(
                f"the ranks' weights differed in {self.drifts} of {self.drift_checks} comparisons"
                + ("; rank 0's were broadcast" if self.drifts else "")
            )
        if self.noise is not None:
            lines.append(str(self.noise))
        lines.append(f"evenstride itself took {self.overhead_s * 1e3:.3f} ms per step")
        return "\n".join(lines)

    def _begins(self) -> str:
        steps = f"{self.step} steps"
        if self.staleness is not None:
            steps = f"{self.step} own updates, rounds"
        return (
            f"{steps} of {self.global_batch} samples on {max(len(self.workers), 1)} worker(s), "
            f"policy {self.policy}, {self.changes} change(s) of the split"
        )

    def _unmeasured(self) -> str:
        shares = "/".join(str(worker.share) for worker in self.workers[:16])
        return f"Not measured: {self.not_measured}." + (f" Shares stay {shares}" if shares else "")

    def _speed(self) -> str:
        shares = "/".join(str(worker.share) for worker in self.workers[:16])
        text = f"shares {shares}; a step takes {time_text(self.step_s or 0.0)}"
        if self.efficiency_model is None or self.bound_model is None or len(self.workers) < 2:
            return text
        fixed = self.policy.startswith("static")
        lost = 1.0 - (self.speedup_model or 1.0)  # under a fixed split that is no equal one
        if self.bound_model < 1.03 and lost < 0.03:
            return f"{text}; the workers are equal, so balancing cannot help"
        return (
            f"{text}: {self.speedup_model:.2f} times as fast as the equal split would be (bound "
            f"{self.bound_model:.2f}), efficiency {self.efficiency_model:.2f}, from fitted curves"
            + ("" if self.changes or not fixed else "; no other split was run, so this is a guess")
        )

    def _order(self) -> list[str]:
        """Return what is not promised about the order of this data."""
        lines = []
        if self.by_epoch:
            lines.append(
                "each rank keeps to a part of the data set for an epoch, so which samples a step "
                "trains depends on the split, and a state saved in mid-epoch on the number of ranks"
            )
        if self.shards:
            lines.append(
                f"each rank reads some of {self.shards} shards in a row, so which samples a step "
                "trains depends on the split and on the number of ranks"
            )
        return lines

    def _waits(self) -> list[str]:
        total_s = sum(worker.busy_s + worker.waited_s for worker in self.workers)
        blamed = sorted(self.workers, key=lambda worker: -worker.caused_s)[:3]
        return [
            f"worker {worker.name} made the others wait {time_text(worker.caused_s)} in all "
            f"({worker.caused_s / total_s:.0%} of all workers' time), as the slowest of "
            f"{worker.slowest_steps} steps"
            for worker in blamed
            if total_s > 0 and worker.caused_s > 0.02 * total_s
        ]


def summarise(leader: Leader | None, **facts: Any) -> Summary:
    """Return the summary of a run from what its leader has booked, and the rank's own facts."""
    if leader is None:
        return Summary(**facts)
    control, ledger = leader.control, leader.ledger
    return Summary(
        workers=worker_summaries(control, ledger),
        changes=leader.changes,
        step_s=ledger.took_s / ledger.steps if ledger.steps else None,
        efficiency_model=ledger.efficiency_model,
        speedup_model=ledger.speedup_model,
        bound_model=ledger.bound_model,
        **facts,
    )


def worker_summaries(control: Control, ledger: Ledger) -> tuple[WorkerSummary, ...]:
    """Return each worker's totals, in rank order."""
    if control.fleet is None:
        return ()
    return tuple(
        WorkerSummary(
            name=worker.name,
            share=control.shares[rank],
            busy_s=float(ledger.busy_s[rank]),
            waited_s=float(ledger.waited_s[rank]),
            caused_s=float(ledger.caused_s[rank]),
            slowest_steps=int(ledger.slowest_steps[rank]),
            data_s=float(ledger.data_s[rank]),
            outside_s=float(ledger.outside_s[rank]),
            refused=control.refused[rank],
            cap=control.memory.ends(rank),
            memory=control.memory.models[rank].reason() if control.memory.models else "",
        )
        for rank, worker in enumerate(control.fleet.workers)
    )


def _stale(told: dict[str, Any]) -> str:
    made = "/".join(str(worker["count"]) for worker in told["workers"][:16])
    again = told["handed_out_again"]
    return (
        f"{told['count']} updates ({made} by the workers) of staleness {told['mean']:.2f} on "
        f"average and {told['maximum']} at most; who had ended an update was at most "
        f"{told['most_ahead']} ahead of the slowest"
        + (f"; {again} samples of workers that were lost were handed out again" if again else "")
    )
