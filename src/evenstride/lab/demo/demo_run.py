"""The demo from the outside: limits, workers, news, and the figures of what the ranks measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenstride.core.time_model.observation import median
from evenstride.lab.comparison.comparison_result import Comparison, Oracle, PolicyRun, calibrated
from evenstride.lab.demo.demo_schedule import NEWS, REPORT, TRACE, Block, DemoSchedule, Report
from evenstride.lab.demo.fashion_mnist import check_data
from evenstride.lab.processes.cpu_limits import open_limits
from evenstride.lab.processes.local_launch import Launch, LaunchProgress, run
from evenstride.lab.processes.speeds import Speeds, check_fit, usable_cpus
from evenstride.lab.processes.trial_checkpoints import make_folder
from evenstride.trace.read import LineTail

_SCRIPT = Path(__file__).with_name("demo_script.py")
# Steps at the end whose mean loss is reported: one epoch's worth or so.
_LAST_STEPS = 20

News = Callable[[dict[str, Any]], None]
"""Called with what goes on, as it happens."""


def run_demo(
    plan: DemoSchedule, speeds: Speeds, news: News, watch: Callable[[], None] = lambda: None
) -> Comparison:
    check_fit(speeds, usable_cpus())
    check_data(plan.data)
    make_folder(plan.folder)
    for name in (NEWS, REPORT, TRACE):  # of an earlier demo in this folder
        (plan.folder / name).unlink(missing_ok=True)
    plan.save(plan.folder / "plan.json")
    limits, caveat = open_limits(len(speeds))
    news({"what": "limits", "kind": limits.kind, "caveat": caveat})
    launch = Launch(
        command=(str(_SCRIPT), str(plan.folder / "plan.json")),
        speeds=speeds,
        environment={"EVENSTRIDE_TRACE": "", "EVENSTRIDE_POLICY": "", "EVENSTRIDE_MAX_STEPS": ""},
        deadline_s=1200.0,
    )
    tail = LineTail(plan.folder / NEWS)

    def look(_: LaunchProgress) -> None:
        for item in tail.records():
            news(item)
        watch()

    try:
        run(launch, limits, plan.folder, look)
        look(LaunchProgress(0, 0.0))
    finally:
        limits.close()
    report = Report.load(plan.folder / REPORT)
    outcome = compare(report, speeds, limits.kind, str(plan.folder / TRACE))
    return replace(outcome, caveats=(caveat,) if caveat else ())


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
