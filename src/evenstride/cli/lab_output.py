"""Lab sessions on the command line: plan, progress, results and plots.

A session ends with its figures on stdout. Its exit code shows whether they are valid.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import typer

from evenstride.cli.arguments import every_policy, split_policies
from evenstride.cli.live_progress import LiveTable
from evenstride.cli.terminal_text import print_drawbacks, print_table, say
from evenstride.core.policies import policy_from_spec
from evenstride.errors import ConfigError
from evenstride.lab.comparison import lab_session
from evenstride.lab.comparison.comparison_result import Comparison, ModesComparison
from evenstride.lab.comparison.comparison_text import (
    bound_lines,
    disturbance,
    missed_speeds,
    rate_over,
    ratio_text,
)
from evenstride.lab.comparison.lab_session import LabPlan, Viewer
from evenstride.lab.comparison.trace_figures import Rates, leader_steps, mean_step_s
from evenstride.lab.processes.speeds import parse_change, parse_speeds
from evenstride.report import suite_figures
from evenstride.report.suite_figures import ShareBand
from evenstride.report.suite_text import mean_edge
from evenstride.report.wording import NOTHING, Table
from evenstride.sim.scoring.suite import FIELDS
from evenstride.trace.run_log import RunLog

DISTURBED = 3
"""Exit code of a complete measurement on a machine whose speed changed."""

_OURS, _EQUAL = "adaptive", "uniform"
_STEPS = 120
_HEADINGS = (
    "sync",
    "policy",
    "samples/s",
    "over\nequal",
    "waiting",
    "staleness\nmean",
    "staleness\nmost",
    "period\nshortest",
    "period\nlongest",
    "samples",
)


def conclude(
    outcome: Comparison,
    story: Callable[[Comparison], str],
    as_json: bool,
    figures: dict[str, Any] | None = None,
) -> None:
    """Print the outcome as text or JSON, and exit with its code.

    ``figures`` replace the outcome in the JSON.
    """
    if as_json:
        typer.echo(json.dumps(outcome.to_dict() if figures is None else figures))
    else:
        say(story(outcome))
    _end_with(outcome)


def _end_with(outcome: Comparison | ModesComparison) -> None:
    """Print notes on the figures, and exit with the outcome's code."""
    for caveat in filter(None, (*outcome.caveats, missed_speeds(outcome))):
        say(f"note: {caveat}", err=True)
    if outcome.disturbed:
        say(disturbance(outcome), err=True)
        raise typer.Exit(DISTURBED)


def perform(plan: LabPlan) -> tuple[Comparison, dict[str, list[Path]]]:
    """Return the outcome of a lab session and each policy's traces; show the progress."""
    traces: dict[str, list[Path]] = {}
    with LiveTable(plan.speeds) as board:

        def begins(trace: Path, policy: str) -> None:
            traces.setdefault(policy, []).append(trace)
            board.follow(trace, policy)

        viewer = Viewer(board.say, begins, lambda _: board.refresh())
        return lab_session.run_lab(plan, viewer), traces


def tell(outcome: Comparison) -> str:
    rows = [
        (
            run.policy,
            f"{run.step_s * 1e3:.1f} ms",
            f"{run.samples_per_s:.0f}",
            "" if run.efficiency is None else ratio_text(run.efficiency, run.efficiency_interval),
            f"{run.changes}",
            "/".join(map(str, run.shares)),
        )
        for run in outcome.runs
    ]
    if (best := outcome.oracle) is not None:
        shares = "/".join(map(str, best.shares))
        rows.append(("best fixed split", f"{best.step_s * 1e3:.1f} ms", "", "", "", shares))
    headings = ("policy", "step", "samples/s", "efficiency", "changes", "samples")
    lines = [f"\n{cluster_line(outcome)}\n", Table(headings, tuple(rows)).text()]
    figures = bound_lines(outcome, "\nspeed-up over the equal split")
    return "\n".join([*lines, *figures, f"trace {outcome.trace}"])


def cluster_line(outcome: Comparison | ModesComparison) -> str:
    """Return a description of the measured workers."""
    measured = outcome.achieved_speeds
    return (
        f"{outcome.workers} workers at speeds {_numbers(outcome.speeds)}"
        + (f" (measured {_numbers(measured)})" if measured else "")
        + f", global batch {outcome.global_batch}"
    )


def _numbers(values: tuple[float, ...]) -> str:
    return " / ".join(f"{value:.3g}" for value in values)


def compare_modes(plan: LabPlan, as_json: bool) -> None:
    """Run the plan's modes in the lab, print the results, and exit with the outcome's code."""
    with LiveTable(plan.speeds) as board:
        viewer = Viewer(board.say, board.follow, lambda _: board.refresh())
        outcome = lab_session.run_modes(plan, viewer)
    if as_json:
        typer.echo(json.dumps(outcome.to_dict()))
    else:
        say(f"\n{cluster_line(outcome)}\n")
        print_table(modes_table(outcome.by_arm()))
        typer.echo(f"\ntraces {outcome.folder}")
    print_drawbacks(plan.modes)
    _end_with(outcome)


def modes_table(arms: dict[tuple[str, str], list[Rates]]) -> Table:
    """Return a line for each mode and policy: means over its runs."""
    equal = {sync: runs for (sync, policy), runs in arms.items() if policy == _EQUAL}
    lines = (_line(sync, policy, runs, equal.get(sync)) for (sync, policy), runs in arms.items())
    return Table(_HEADINGS, tuple(lines), keys=2)


def _line(sync: str, policy: str, runs: list[Rates], equal: list[Rates] | None) -> tuple[str, ...]:
    periods = [[one.period_s for one in run.workers if one.updates] for run in runs]
    stale = [run.staleness for run in runs if run.staleness is not None]
    return (
        sync,
        policy,
        f"{_rate(runs):.0f}",
        NOTHING if equal is None else rate_over(runs, equal),
        f"{sum(run.waiting for run in runs) / len(runs):.1%}",
        f"{sum(mean for mean, _ in stale) / len(stale):.2f}" if stale else NOTHING,
        str(max(most for _, most in stale)) if stale else NOTHING,
        mean_edge(periods, min),
        mean_edge(periods, max),
        "/".join(map(str, runs[-1].shares)),
    )


def _rate(runs: list[Rates]) -> float:
    return sum(run.samples_per_s for run in runs) / len(runs)


def real_plan(
    command: Sequence[str] | None,
    policies: Sequence[str] | None,
    speeds: str,
    changes: Sequence[str],
    *,
    repeats: int,
    steps: int | None,
) -> LabPlan:
    """Return the lab session of ``compare --real``; ``None`` stands for an option not given."""
    _refuse_scenario(command)
    limits = parse_speeds(speeds)
    names = split_policies(policies) if policies else every_policy()
    for name in names:
        policy_from_spec(name)
    # The lab reports the speed-up of the last policy over the first.
    names = tuple(sorted(names, key=lambda name: (name != _EQUAL, name == _OURS)))
    folder = Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
    return LabPlan(
        command=tuple(command or [own_script()]),
        speeds=limits,
        policies=names,
        steps=steps or _STEPS,
        repeats=repeats,
        changes=tuple(parse_change(text, len(limits)) for text in changes),
        folder=folder.resolve(),
        calibrate=True,
    )


def _refuse_scenario(command: Sequence[str] | None) -> None:
    if command and Path(command[0]).suffix.lower() in (".yaml", ".yml"):
        raise ConfigError(
            f"--real runs a script, but {command[0]} is a scenario; leave --real out to simulate "
            "it, give a script, or leave the argument out for the package's own script"
        )


def own_script() -> str:
    """Return the path of the default script without importing it."""
    spec = find_spec("evenstride.lab.comparison.sample_script")
    assert spec is not None, "it is part of the package"
    return str(spec.origin)


def compare_real(plan: LabPlan, plot: Path | None, as_json: bool) -> None:
    """Run the policies in the lab, print the results, and exit with the outcome's code."""
    if plot:
        suite_figures.check_plotting()
        suite_figures.check_writable(_plot(plan, plot))
    outcome, traces = perform(plan)
    means = {policy: mean_step_s(traces[policy]) for policy in plan.policies}
    figures = {"rows": _rows(outcome), "mean_step_s": means, "comparison": outcome.to_dict()}
    try:
        conclude(outcome, lambda one: f"{tell(one)}\n\n{_sentence(means)}", as_json, figures)
    finally:  # after the figures, so that a failing plot does not hide them
        if plot:
            _draw(traces, plan, _plot(plan, plot))


def _rows(outcome: Comparison) -> list[dict[str, Any]]:
    """Return rows with the fields of simulated runs; ``None`` where nothing is measured."""
    steps_s = {run.policy: run.step_s for run in outcome.runs}
    return [
        {
            **dict.fromkeys(FIELDS),
            "scenario": "real " + "/".join(f"{speed:g}" for speed in outcome.speeds),
            "policy": run.policy,
            "efficiency": run.efficiency,
            "speedup": steps_s[_EQUAL] / run.step_s if _EQUAL in steps_s else None,
            "bound": outcome.bound,
            "linear_bound": outcome.linear_bound,
        }
        for run in outcome.runs
    ]


def _sentence(means: dict[str, float]) -> str:
    """Return a comparison by the mean of all steps after the cold block, changes included."""
    others = {policy: mean_s for policy, mean_s in means.items() if policy != _OURS}
    if _OURS not in means or not others:
        return f"Mean step {', '.join(f'{m * 1e3:.1f} ms ({p})' for p, m in means.items())}."
    best = min(others, key=lambda policy: others[policy])
    part = means[_OURS] / others[best] - 1.0
    how = "longer" if part > 0 else "shorter"
    return (
        f"Mean step after the cold block: {_OURS} {means[_OURS] * 1e3:.1f} ms, {abs(part):.1%} "
        f"{how} than the best other policy ({best}, {others[best] * 1e3:.1f} ms)."
    )


def _plot(plan: LabPlan, folder: Path) -> Path:
    return folder / f"real-{'-'.join(f'{speed:g}' for speed in plan.speeds)}.png"


def _draw(traces: dict[str, list[Path]], plan: LabPlan, path: Path) -> None:
    workers = len(plan.speeds)
    panels = [_panel(one, traces[one][0], workers, plan.steps) for one in plan.policies]
    title = f"real workers at speeds {', '.join(f'{s:g}' for s in plan.speeds)}"
    suite_figures.draw(panels, title, path)
    say(f"plot written to {path}", err=True)


def _panel(policy: str, trace: Path, workers: int, steps: int) -> suite_figures.Panel:
    """Return the panel of a run's trace, with gaps at steps that were not measured."""
    log = RunLog(trace)
    step_s, shares = np.full(steps, np.nan), np.full((workers, steps), np.nan)
    for step, time_s in leader_steps(log):
        step_s[step] = time_s
    for seen in log.observations:
        shares[seen.worker, seen.first_step : seen.first_step + seen.steps] = seen.share
    bands = [ShareBand(f"worker {n}", mine, mine, mine) for n, mine in enumerate(shares)]
    return suite_figures.Panel(policy, {"step": step_s}, bands)
