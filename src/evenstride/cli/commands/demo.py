"""``evenstride demo``: equal and balanced batches compared on this machine, in two minutes."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from evenstride.cli.live_progress import LiveTable
    from evenstride.lab.comparison.comparison_result import Comparison


def demo(
    speeds: Annotated[
        str, typer.Option(help="Speed of each worker, as a fraction of one core.")
    ] = "1,0.5,0.2",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the four .gz files of Fashion-MNIST, to use instead of digits."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report, traces and logs; runs/demo-TIME by default."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a small network on workers of unequal speed, with equal and with balanced batches.

    The workers are processes under CPU limits. Both runs train the same samples from the same
    start. Two fixed splits near the optimum train too, for comparison. All take turns in short
    blocks, so that changes of the machine's speed cancel in the ratios. The report page compares
    both runs.

    Examples:
        evenstride demo

        evenstride demo --speeds 1,0.3 --json

        evenstride demo --data data/fashion-mnist
    """
    from evenstride.cli.lab_output import conclude
    from evenstride.cli.live_progress import LiveTable
    from evenstride.lab.demo.demo_run import run_demo
    from evenstride.lab.demo.demo_schedule import DemoSchedule
    from evenstride.lab.processes.speeds import parse_speeds

    wanted = parse_speeds(speeds)
    folder = out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    plan = DemoSchedule(folder.resolve(), data.resolve() if data else None)
    with LiveTable(wanted) as board:
        board.follow(plan.folder / "adaptive.jsonl", "balanced")
        outcome = run_demo(plan, wanted, lambda item: _news(board, item), board.refresh)
    conclude(outcome, partial(story, shown=folder), as_json)


def _news(board: LiveTable, item: dict[str, Any]) -> None:
    match item["what"]:
        case "limits":
            board.say(f"CPU limits: {item['kind']}.")
            if item["caveat"]:
                board.say(item["caveat"])
        case "block":
            shares = "/".join(map(str, item["shares"]))
            name = {"uniform": "equal", "adaptive": "balanced"}.get(item["policy"], "fixed split")
            board.say(f"{name:12} {item['step_s'] * 1e3:7.1f} ms per step, samples {shares}")
        case "round":
            equal, balanced, *fixed = (f"{step_s * 1e3:.1f}" for step_s in item["step_s"])
            board.say(
                f"round {item['number']} of {item['of']}: {equal} ms per step with equal batches, "
                f"{balanced} balanced, {' and '.join(fixed)} with fixed splits"
            )
        case what:
            board.say(f"{what} ...")


def story(outcome: Comparison, shown: Path | None = None) -> str:
    """Return the figures; ``shown`` is the folder of the report page as the user gave it."""
    from evenstride.lab.comparison.comparison_text import bound_lines, ratio_text
    from evenstride.report.wording import Table

    equal, balanced = outcome.runs
    assert outcome.oracle is not None, "the demo always runs fixed splits"
    asked = " / ".join(f"{speed:g}" for speed in outcome.speeds)
    got = " / ".join(f"{speed:.2f}" for speed in outcome.achieved_speeds)
    rows = [
        (
            "samples",
            _shares(equal.shares),
            _shares(balanced.shares),
            _shares(outcome.oracle.shares),
        ),
        ("step", _ms(equal.step_s), _ms(balanced.step_s), _ms(outcome.oracle.step_s)),
        ("samples/s", f"{equal.samples_per_s:.0f}", f"{balanced.samples_per_s:.0f}", ""),
        (
            "efficiency",
            *(ratio_text(run.efficiency or 0.0, run.efficiency_interval) for run in outcome.runs),
            "1",
        ),
        ("final loss", f"{equal.final_loss:.5f}", f"{balanced.final_loss:.5f}", ""),
        ("test accuracy", f"{equal.test_accuracy:.1%}", f"{balanced.test_accuracy:.1%}", ""),
        ("lost, repeated", _audit(equal), _audit(balanced), ""),
    ]
    table = Table(("", "equal", "balanced", "best fixed split"), tuple(rows)).text()
    lines = [
        f"\n{outcome.workers} workers at speeds {asked} (measured {got}), global batch "
        f"{outcome.global_batch}\n\n{table}\n",
        *bound_lines(outcome),
        f"trace {outcome.trace}\n",
        _sentence(outcome),
    ]
    if outcome.report is not None:
        page = Path(outcome.report)
        lines.append(f"Open {page if shown is None else shown / page.name} in a browser.")
    return "\n".join(lines)


def _sentence(outcome: Comparison) -> str:
    equal, balanced = outcome.runs
    slowest = min(range(outcome.workers), key=lambda rank: outcome.achieved_speeds[rank])
    if outcome.bound is None or outcome.bound < 1.03:
        return "The workers are equally fast, so balancing cannot help."
    low, _ = outcome.speedup_interval or (equal.step_s / balanced.step_s, 0.0)
    if outcome.disturbed and low <= 1.0:
        return (
            "Other work on this machine made the speed-up so uncertain that it may be 1. The demo "
            "shows nothing. Run it again when the machine is quiet."
        )
    return (
        f"With equal batches, all other workers waited for worker {slowest}. evenstride gave it "
        f"{balanced.shares[slowest]} samples per step instead of {equal.shares[slowest]}. The same "
        f"training, sample for sample, took {balanced.step_s / equal.step_s:.0%} of the time."
    )


def _shares(shares: tuple[int, ...]) -> str:
    return "/".join(map(str, shares))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _audit(run: Any) -> str:
    return f"{run.samples_lost}, {run.samples_repeated}"
