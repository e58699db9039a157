"""Run the demo: start its workers under CPU limits, and compute the figures of their report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenstride.lab.comparison.block_comparison import busy_curves, compare_blocks, completed
from evenstride.lab.comparison.comparison_result import (
    Comparison,
    Curve,
    Oracle,
    PolicyRun,
    achieved_speeds,
    drift,
    prospect_of,
)
from evenstride.lab.comparison.paired_ratios import Ratio, geometric_mean, middle_mean
from evenstride.lab.demo.demo_schedule import (
    EQUAL_TRACE,
    NEWS,
    REPORT,
    TRACE,
    Block,
    DemoSchedule,
    Report,
)
from evenstride.lab.demo.fashion_mnist import check_data
from evenstride.lab.processes.cpu_limits import open_limits
from evenstride.lab.processes.local_launch import Launch, LaunchProgress, run
from evenstride.lab.processes.speeds import Speeds, check_fit, usable_cpus
from evenstride.lab.processes.trial_checkpoints import make_folder
from evenstride.report.page.html_page import REPORT_NAME, page_of, write_page
from evenstride.report.page.page_runs import read_run
from evenstride.trace.read import LineTail

_SCRIPT = Path(__file__).with_name("demo_script.py")
_LAST_STEPS = 20  # steps whose mean loss is the final loss
_COMPARED = ("uniform", "adaptive")

News = Callable[[dict[str, Any]], None]
"""Called with a record of what happens, such as a finished round."""


def run_demo(
    plan: DemoSchedule, speeds: Speeds, news: News, watch: Callable[[], None] = lambda: None
) -> Comparison:
    check_fit(speeds, usable_cpus())
    check_data(plan.data)
    make_folder(plan.folder)
    for name in (NEWS, REPORT, TRACE, EQUAL_TRACE):  # an earlier demo may have left them
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
    caveats = (caveat,) if caveat else ()
    return replace(outcome, caveats=caveats, report=write_report(plan.folder))


def write_report(folder: Path) -> str | None:
    """Write a page that compares the two traces of a demo; return its path, if there are traces."""
    traces = {"equal": folder / EQUAL_TRACE, "balanced": folder / TRACE}
    if not all(trace.is_file() for trace in traces.values()):
        return None
    page = folder / REPORT_NAME
    write_page(page_of([read_run(trace, name, 2) for name, trace in traces.items()]), page)
    return str(page)


def compare(report: Report, speeds: Speeds, limits: str, trace: str) -> Comparison:
    """Return the comparison that follows from a report.

    All times are those of the rounds. The cold blocks before them count in no time.
    """
    rounds = _rounds(report)
    blocks_s = _step_times(rounds[0])
    curves = [
        completed(busy_curves([_work(mine[number]) for mine in rounds]), _before(report))
        for number in range(len(rounds[0]))
    ]
    communication_s = _communication_s(rounds)
    prospects = [prospect_of(one, report.global_batch, communication_s) for one in curves]
    fixed = [policy for policy in blocks_s if policy.startswith("static:")]
    ratios = compare_blocks(blocks_s, "adaptive", fixed, prospects)
    assert ratios.oracle is not None, "the demo always runs fixed splits"
    whole = busy_curves([[one for some in mine for one in _work(some)] for mine in rounds])
    return Comparison(
        workers=len(report.ranks),
        speeds=speeds,
        achieved_speeds=achieved_speeds(completed(whole, _before(report)), max(speeds)),
        disturbed=ratios.disturbed,
        drift=round(drift(curves[0], curves[-1]), 4),
        limits=limits,
        global_batch=report.global_batch,
        runs=[
            _run(report, policy, blocks_s[policy], ratios.efficiency[policy])
            for policy in _COMPARED
        ],
        oracle=Oracle(_shares(report, ratios.oracle), geometric_mean(blocks_s[ratios.oracle])),
        linear_bound=geometric_mean([[one.linear_bound for one in prospects]]),
        trace=trace,
        **ratios.fields(),
    )


def _before(report: Report) -> list[Curve]:
    return [mine.before for mine in report.ranks]


def _rounds(report: Report) -> list[list[tuple[Block, ...]]]:
    """Return the blocks of each rank and round."""
    warm = [[block for block in mine.blocks if not block.cold] for mine in report.ranks]
    arms = len({block.policy for block in warm[0]})
    return [
        [tuple(mine[first : first + arms]) for first in range(0, len(mine), arms)] for mine in warm
    ]


def _step_times(rounds: list[tuple[Block, ...]]) -> dict[str, list[tuple[float]]]:
    """Return the step times of the leader's blocks, by policy and round."""
    found: dict[str, list[tuple[float]]] = {}
    for blocks in rounds:
        for block in blocks:
            found.setdefault(block.policy, []).append((middle_mean(block.step_s),))
    return found


def _work(blocks: Iterable[Block]) -> list[tuple[int, float]]:
    return [step for block in blocks for step in block.work]


def _communication_s(rounds: list[list[tuple[Block, ...]]]) -> float:
    """Return the waiting time of the worker that waits least, under the policy with least of it.

    The slowest worker of a step waits for communication only.
    """
    policies = {block.policy for block in rounds[0][0]}
    return min(_least_wait_s(rounds, policy) for policy in policies)


def _least_wait_s(rounds: list[list[tuple[Block, ...]]], policy: str) -> float:
    waits_s = [
        [
            step_s - busy_s
            for blocks in mine
            for block in blocks
            if block.policy == policy
            for step_s, (_, busy_s) in zip(block.step_s, block.work, strict=True)
        ]
        for mine in rounds
    ]
    return middle_mean([min(each) for each in zip(*waits_s, strict=True)])


def _run(report: Report, policy: str, blocks_s: list[tuple[float]], efficiency: Ratio) -> PolicyRun:
    step_s = geometric_mean(blocks_s)
    lost, repeated = audit(report, policy)
    return PolicyRun(
        policy=policy,
        step_s=step_s,
        samples_per_s=report.global_batch / step_s,
        efficiency=efficiency.value,
        shares=_shares(report, policy),
        final_loss=final_loss(report, policy),
        test_accuracy=report.ranks[0].accuracy[policy],
        samples_lost=lost,
        samples_repeated=repeated,
        changes=report.changes if policy == "adaptive" else 0,
        efficiency_interval=efficiency.interval,
    )


def _shares(report: Report, policy: str) -> tuple[int, ...]:
    return _blocks(report, 0, policy)[-1].shares


def final_loss(report: Report, policy: str) -> float:
    """Return the mean loss per sample over the last steps that both policies trained."""
    steps = min(sum(len(b.losses) for b in _blocks(report, 0, p)) for p in _COMPARED)
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
    """Return the numbers of lost and of repeated samples, from the delivered ids.

    All epochs but the last are finished, so each of their samples must appear once. In the last
    epoch no sample may appear twice.
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
