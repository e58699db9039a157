"""Summary of a run, as numbers and as sentences."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from evenstride.core.control.state import Control
from evenstride.core.diagnostics.ledger import Ledger
from evenstride.core.formatting import time_text
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.noise.noise_meter import NoiseSummary

# Workers whose memory limits are listed.
_MOST_CAPS = 8


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """Totals of one worker in a run; times are in seconds, over all reported steps.

    A worker is a rank or, under HSDP, a shard group. A shard group is busy while its slowest rank
    is busy, and waits for other shard groups.

    Args:
        name: Host and rank, or the ranks of a shard group: ``host/0-3``.
        share: Samples per step at the end; of all ranks of a shard group.
        busy_s: Busy time.
        waited_s: Time spent waiting for slower workers.
        caused_s: Waiting time of other workers in steps in which this one was the slowest.
        slowest_steps: Steps in which this worker was the slowest.
        data_s: Part of the busy time spent waiting for data.
        outside_s: Time outside training (evaluation, saving) beyond the usual.
        refused: Rejected reports with impossible times or shares.
        cap: Predicted number of samples that fit in its memory; ``None`` if unknown.
        memory: Sentence on its memory limit; empty if unknown.
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
    """Summary of a run so far, from the leader's data; ``str()`` returns sentences.

    Figures whose names end in ``_model`` rest on fitted curves, not on measured splits. Each step
    uses the curves as fitted at that step. They are ``None`` until every worker has been measured.

    Args:
        rank: Rank that made the summary; only rank 0's is complete.
        epoch: Current epoch.
        step: Steps committed by this process.
        global_batch: Samples per step.
        policy: Specification of the policy.
        workers: In rank order; shard groups in order of their lowest rank.
        changes: Changes of the shares after the opening split.
        step_s: Mean step time in seconds: busy time of the slowest worker, and communication.
        efficiency_model: Step time of the best split over the measured one; 1 is ideal.
        speedup_model: Step time of the equal split over the measured one.
        bound_model: Step time of the equal split over that of the best split.
        samples_dropped: Samples that ``drop_last`` omits from every epoch.
        overhead_s: evenstride's own time per step, on the training thread and its own threads.
        by_epoch: Whether each rank keeps to a part of the data set for an epoch.
        shards: Number of shards of a sequential data set; 0 for other data.
        batches_repeated: Batches of this rank that ran out of memory and were repeated.
        fits: Largest number of samples in this rank's batches since then.
        drift_checks: Comparisons of the ranks' weights.
        drifts: Comparisons in which the weights differed and rank 0's were broadcast.
        sync: Synchronisation mode; ``forgoes`` lists what it does not guarantee, as sentences.
        staleness: Staleness of the updates, in modes without lockstep: ``count``, ``mean``,
            ``maximum`` and ``histogram``, the same for each of the ``workers``, ``most_ahead`` and
            ``handed_out_again``. See
            `evenstride.runtime.parameter_server.work_dispatcher.WorkDispatcher.report`.
        noise: Noise of the gradient, if measured; see `NoiseSummary`.
        not_measured: Reason why step times could not be measured; empty if they were.
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
            lines.append(f"rank {self.rank} has only its own data; rank 0's summary is complete")
        if self.not_measured:
            lines.append(self._unmeasured())
        elif self.step_s is not None:
            lines.append(self._speed())
        lines += self._waits()
        lines += [
            f"worker {worker.name} reported impossible times or shares {worker.refused} time(s); "
            "these reports were ignored"
            for worker in self.workers
            if worker.refused
        ]
        lines += [
            f"worker {worker.name} can hold at most {worker.cap} samples: {worker.memory}"
            for worker in self.workers
            if worker.cap is not None and worker.cap < self.global_batch
        ][:_MOST_CAPS]
        lines += self._order()
        lines += [f"sync {self.sync}: {sentence}" for sentence in self.forgoes]
        if self.staleness:
            lines.append(_stale(self.staleness))
        if self.batches_repeated:
            lines.append(
                f"rank {self.rank} ran out of memory {self.batches_repeated} time(s); its batches "
                f"have had at most {self.fits} samples since"
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
            steps = f"{self.step} updates of this worker in rounds"
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
        lost = 1.0 - (self.speedup_model or 1.0)  # of a fixed split that is not the equal one
        if self.bound_model < 1.03 and lost < 0.03:
            return f"{text}; the workers are equal, so balancing cannot help"
        return (
            f"{text}: {self.speedup_model:.2f} times as fast as the equal split would be (bound "
            f"{self.bound_model:.2f}), efficiency {self.efficiency_model:.2f}, from fitted curves"
            + (
                ""
                if self.changes or not fixed
                else "; this is an extrapolation, as no other split was run"
            )
        )

    def _order(self) -> list[str]:
        """Return limits on the reproducibility of the sample order, as sentences."""
        lines = []
        if self.by_epoch:
            lines.append(
                "each rank keeps to a part of the data set for an epoch, so which samples a step "
                "trains depends on the split"
            )
        if self.shards:
            lines.append(
                f"each rank reads some of {self.shards} shards in sequence, so which samples a "
                "step trains depends on the split and on the number of ranks"
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
    """Return the summary of a run from the leader's ledger and this rank's own facts."""
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


def _stale(report: dict[str, Any]) -> str:
    made = "/".join(str(worker["count"]) for worker in report["workers"][:16])
    again = report["handed_out_again"]
    return (
        f"{report['count']} updates ({made} by worker), with a mean staleness of "
        f"{report['mean']:.2f} and a maximum of {report['maximum']}; a worker was at most "
        f"{report['most_ahead']} updates ahead of the slowest"
        + (f"; {again} samples of lost workers were reassigned" if again else "")
    )
