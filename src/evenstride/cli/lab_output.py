"""Runs a lab session while it is shown, and prints what policies or modes came to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from evenstride.cli.exit_codes import end_with
from evenstride.cli.render.terminal_text import say
from evenstride.cli.suite_request import print_table

if TYPE_CHECKING:
    from evenstride.lab.comparison.comparison_result import Comparison
    from evenstride.lab.comparison.lab_session import LabPlan
    from evenstride.lab.comparison.mode_comparison import ModesComparison
    from evenstride.lab.comparison.run_rates import Rates
    from evenstride.report.text_tables import Table

_EQUAL = "uniform"
_HEADINGS = (
    *("sync", "policy", "samples/s", "over\nequal", "waiting", "staleness\nmean"),
    *("staleness\nmost", "period\nshortest", "period\nlongest", "samples"),
)


def perform(plan: LabPlan) -> tuple[Comparison, dict[str, list[Path]]]:
    """Return what a lab session came to, and each policy's traces; show it meanwhile.

    Raises:
        EvenstrideError: it cannot be, or failed.
    """
    from evenstride.cli.render.live_table import LiveTable
    from evenstride.lab.comparison.lab_session import Viewer
    from evenstride.lab.comparison.policy_runs import run_lab

    traces: dict[str, list[Path]] = {}
    with LiveTable(plan.speeds) as board:

        def begins(trace: Path, policy: str) -> None:
            traces.setdefault(policy, []).append(trace)
            board.follow(trace, policy)

        return run_lab(plan, Viewer(board.say, begins, lambda _: board.refresh())), traces


def tell(outcome: Comparison) -> str:
    """Return the outcome of a lab session as people read it."""
    from evenstride.report.text_tables import Table

    rows = [
        (
            run.policy,
            f"{run.step_s * 1e3:.1f} ms",
            f"{run.samples_per_s:.0f}",
            "" if run.efficiency is None else f"{run.efficiency:.2f}",
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
    if outcome.speedup is not None:
        bound = "" if outcome.bound is None else f", bound {outcome.bound:.2f}"
        lines.append(f"\nspeed-up over equal batches {outcome.speedup:.2f}{bound}")
    return "\n".join([*lines, f"trace {outcome.trace}"])


def cluster_line(outcome: Comparison | ModesComparison) -> str:
    """Return what the figures were measured on."""
    measured = outcome.achieved_speeds
    return (
        f"{outcome.workers} workers at speeds {_numbers(outcome.speeds)}"
        + (f" (measured {_numbers(measured)})" if measured else "")
        + f", global batch {outcome.global_batch}"
    )


def _numbers(values: tuple[float, ...]) -> str:
    return " / ".join(f"{value:.3g}" for value in values)


def compare_modes(plan: LabPlan, as_json: bool) -> None:
    """Run the plan's modes in the lab, print what they came to, and leave with its exit code.

    Raises:
        EvenstrideError: it cannot be, or failed.
    """
    from evenstride.cli.render.live_table import LiveTable
    from evenstride.lab.comparison.lab_session import Viewer
    from evenstride.lab.comparison.mode_comparison import run_modes

    with LiveTable(plan.speeds) as board:
        outcome = run_modes(plan, Viewer(board.say, board.follow, lambda _: board.refresh()))
    if as_json:
        typer.echo(json.dumps(outcome.to_dict()))
    else:
        _tell(outcome)
    for mode in plan.modes:
        for sentence in mode.forgoes:
            say(f"note: {mode}: {sentence}", err=True)
    end_with(outcome)


def _tell(outcome: ModesComparison) -> None:
    say(f"\n{cluster_line(outcome)}\n")
    print_table(modes_table(outcome.by_arm()))
    typer.echo(f"\ntraces {outcome.folder}")


def modes_table(arms: dict[tuple[str, str], list[Rates]]) -> Table:
    """Return a line for each mode and policy: means over its runs."""
    from evenstride.report.text_tables import Table

    equal = {sync: _rate(runs) for (sync, policy), runs in arms.items() if policy == _EQUAL}
    lines = (_line(sync, policy, runs, equal.get(sync)) for (sync, policy), runs in arms.items())
    return Table(_HEADINGS, tuple(lines), keys=2)


def _line(sync: str, policy: str, runs: list[Rates], equal: float | None) -> tuple[str, ...]:
    from evenstride.report.mode_table import mean_edge
    from evenstride.report.text_tables import NOTHING

    periods = [[one.period_s for one in run.workers if one.updates] for run in runs]
    stale = [run.staleness for run in runs if run.staleness is not None]
    return (
        *(sync, policy, f"{_rate(runs):.0f}"),
        NOTHING if equal is None else f"{_rate(runs) / equal:.2f}",
        f"{sum(run.waiting for run in runs) / len(runs):.1%}",
        f"{sum(mean for mean, _ in stale) / len(stale):.2f}" if stale else NOTHING,
        str(max(most for _, most in stale)) if stale else NOTHING,
        *(mean_edge(periods, edge) for edge in (min, max)),
        "/".join(map(str, runs[-1].shares)),
    )


def _rate(runs: list[Rates]) -> float:
    return sum(run.samples_per_s for run in runs) / len(runs)
