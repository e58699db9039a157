"""``evenstride demo``: equal and balanced training on this machine, in under two minutes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from evenstride.cli.live_progress import LiveTable
    from evenstride.lab.comparison.comparison_result import Comparison


def demo(
    speeds: Annotated[
        str, typer.Option(help="Speed of each worker, as a fraction of a core.")
    ] = "1,0.5,0.2",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with the four .gz files of Fashion-MNIST. Default: digits."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for traces and logs. Default: runs/demo-TIME.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a small network on throttled workers, with the equal and with the balanced split.

    The workers are processes under CPU limits. Both runs train the same samples from the same
    initial model. Fixed splits around the measured optimum run in turn with them for comparison.
    Then: evenstride report on the folder.

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
    conclude(outcome, story, as_json)


def _news(board: LiveTable, item: dict[str, Any]) -> None:
    match item["what"]:
        case "limits":
            board.say(f"Workers are slowed down by {item['kind']}.")
            if item["caveat"]:
                board.say(item["caveat"])
        case "block":
            shares = "/".join(map(str, item["shares"]))
            name = {"uniform": "equal", "adaptive": "balanced"}.get(item["policy"], "fixed split")
            board.say(f"{name:12} {item['step_s'] * 1e3:7.1f} ms per step, samples {shares}")
        case what:
            board.say(f"{what} ...")


def story(outcome: Comparison) -> str:
    from evenstride.report.wording import Table

    equal, balanced = outcome.runs
    assert outcome.oracle is not None, "the demo always runs fixed splits"
    assert outcome.speedup is not None, "the demo always runs the equal split"
    requested = " / ".join(f"{speed:g}" for speed in outcome.speeds)
    achieved = " / ".join(f"{speed:.2f}" for speed in outcome.achieved_speeds)
    rows = [
        (
            "samples",
            _shares(equal.shares),
            _shares(balanced.shares),
            _shares(outcome.oracle.shares),
        ),
        ("step", _ms(equal.step_s), _ms(balanced.step_s), _ms(outcome.oracle.step_s)),
        ("samples/s", f"{equal.samples_per_s:.0f}", f"{balanced.samples_per_s:.0f}", ""),
        ("efficiency", f"{equal.efficiency:.2f}", f"{balanced.efficiency:.2f}", "1"),
        ("final loss", f"{equal.final_loss:.5f}", f"{balanced.final_loss:.5f}", ""),
        ("test accuracy", f"{equal.test_accuracy:.1%}", f"{balanced.test_accuracy:.1%}", ""),
        ("lost, repeated", _audit(equal), _audit(balanced), ""),
    ]
    table = Table(("", "equal", "balanced", "best fixed split"), tuple(rows)).text()
    return (
        f"\n{outcome.workers} workers at speeds {requested} (measured {achieved}), global batch "
        f"{outcome.global_batch}\n\n{table}\n\n"
        f"speed-up {outcome.speedup:.2f}, bound {outcome.bound:.2f} (linear bound "
        f"{outcome.linear_bound:.2f})\ntrace {outcome.trace}\n\n{_sentence(outcome)}"
    )


def _sentence(outcome: Comparison) -> str:
    equal, balanced = outcome.runs
    slowest = min(range(outcome.workers), key=lambda rank: outcome.achieved_speeds[rank])
    if outcome.bound is None or outcome.bound < 1.03:
        return "These workers are equally fast, so there is nothing to balance."
    if outcome.disturbed and balanced.step_s >= equal.step_s:
        return (
            "Other work on this machine took more time than balancing saved, so there is no result."
            " Run the demo again when the machine is idle."
        )
    return (
        f"With the equal split, all workers waited for worker {slowest}. evenstride gave it "
        f"{balanced.shares[slowest]} samples per step instead of {equal.shares[slowest]}, and the "
        f"same training, sample for sample, took {balanced.step_s / equal.step_s:.0%} of the time."
    )


def _shares(shares: tuple[int, ...]) -> str:
    return "/".join(map(str, shares))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _audit(run: Any) -> str:
    return f"{run.samples_lost}, {run.samples_repeated}"
