"""From what the demo's ranks measured to the figures it reports."""

from __future__ import annotations

from collections import Counter

from evenstride.core.time_model.observation import median
from evenstride.lab.comparison.comparison_result import Comparison, Oracle, PolicyRun, calibrated
from evenstride.lab.demo.demo_schedule import Block, Report
from evenstride.lab.limits.speeds import Speeds

# Steps at the end whose mean loss is reported: one epoch's worth or so.
_LAST_STEPS = 20


def compare(report: Report, speeds: Speeds, limits: str, trace: str) -> Comparison:
    """Return the comparison that a report amounts to.

    Speed figures are medians over blocks of the block's median step. The adaptive policy's
    first block, in which it finds its split, is left out.
    """
    leader = report.ranks[0]
    verdict = calibrated(
        [mine.before for mine in report.ranks],
        [mine.after for mine in report.ranks],
        speeds,
        report.global_batch,
        report.communication_s,
    )
    oracle = fastest_fixed(leader.blocks)
    runs = [_run(report, policy, oracle) for policy in ("uniform", "adaptive")]
    return Comparison(
        workers=len(report.ranks),
        speeds=speeds,
        achieved_speeds=verdict.achieved_speeds,
        disturbed=verdict.disturbed,
        drift=verdict.drift,
        limits=limits,
        global_batch=report.global_batch,
        runs=runs,
        oracle=oracle,
        speedup=runs[0].step_s / runs[1].step_s,
        bound=verdict.bound,
        linear_bound=verdict.linear_bound,
        trace=trace,
    )


def fastest_fixed(blocks: list[Block]) -> Oracle:
    """Return the fixed split with the least median step, among those that were run."""
    times_s: dict[tuple[int, ...], list[float]] = {}
    for block in blocks:
        if block.policy.startswith("static:"):
            times_s.setdefault(block.shares, []).append(median(tuple(block.step_s)))
    shares = min(times_s, key=lambda split: median(tuple(times_s[split])))
    return Oracle(shares, median(tuple(times_s[shares])))


def _run(report: Report, policy: str, oracle: Oracle) -> PolicyRun:
    blocks = _blocks(report, 0, policy)
    warm = blocks[1:] if policy == "adaptive" else blocks
    step_s = median(tuple(median(tuple(block.step_s)) for block in warm))
    lost, repeated = audit(report, policy)
    return PolicyRun(
        policy=policy,
        step_s=step_s,
        samples_per_s=report.global_batch / step_s,
        efficiency=oracle.step_s / step_s,
        shares=blocks[-1].shares,
        final_loss=final_loss(report, policy),
        test_accuracy=report.ranks[0].accuracy[policy],
        samples_lost=lost,
        samples_repeated=repeated,
        changes=report.changes if policy == "adaptive" else 0,
    )


def final_loss(report: Report, policy: str) -> float:
    """Return the mean loss per sample over the last steps that all policies have trained."""
    steps = min(sum(len(b.losses) for b in _blocks(report, 0, p)) for p in ("uniform", "adaptive"))
    sums = counts = 0.0
    for rank in range(len(report.ranks)):
        losses = [loss for block in _blocks(report, rank, policy) for loss in block.losses]
        seen = [count for block in _blocks(report, rank, policy) for count in block.counts]
        sums += sum(losses[steps - _LAST_STEPS : steps])
        counts += sum(seen[steps - _LAST_STEPS : steps])
    return sums / counts


def _blocks(report: Report, rank: int, policy: str) -> list[Block]:
    return [block for block in report.ranks[rank].blocks if block.policy == policy]


def audit(report: Report, policy: str) -> tuple[int, int]:
    """Return how many samples were lost and how many repeated, from the ids delivered.

    Every epoch but the last is finished, so each of its samples must have come once; in the
    last one none may have come twice.
    """
    epochs: dict[int, Counter[int]] = {}
    for rank in range(len(report.ranks)):
        for block in _blocks(report, rank, policy):
            for epoch, ids in block.ids:
                epochs.setdefault(epoch, Counter()).update(ids)
    last = max(epochs)
    seen_in = (len(epochs.get(epoch, ())) for epoch in range(last))
    lost = sum(report.train_samples - seen for seen in seen_in)
    repeated = sum(seen.total() - len(seen) for seen in epochs.values())
    return lost, repeated
