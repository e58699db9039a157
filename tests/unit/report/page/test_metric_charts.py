"""What was found of metrics and losses, over all processes of a run."""

from __future__ import annotations

from pathlib import Path

from evenstride.report.page.page_runs import read_run
from evenstride.report.page.series_charts import courses_of
from tests.unit.report.virtual import VirtualRun

NORMS = {"parts": 3, "batch": 96, "local": 1.0, "mean": 1.0}


def process(path: Path, steps: int, kept: int, *, found: int) -> None:
    """Write a process that goes on after so many steps, 100 of which are an epoch."""
    run = VirtualRun(path, lambda _: (1.0, 1.0, 1.0))
    run.begin()
    begun = {"step": 0, "epochs": kept / 100, "samples": 9600, "global_batch": 96}
    run.writer.record("pass", at_s=0.5, **begun)
    run.run(steps)
    for step in range(steps):
        run.writer.record("noise", at_s=1.0, step=step, loss=float(kept + step), **NORMS)
    at = {"step": kept + found, "epochs": (kept + found) / 100}
    run.writer.record("metric", at_s=1.0, name="accuracy", value=float(found), **at)
    run.writer.close()


def test_losses_of_all_processes_stand_at_the_steps_of_the_training(tmp_path: Path) -> None:
    """A second process goes back from step 60 to step 50; it counts its own steps from 0."""
    path = tmp_path / "trace.jsonl"
    process(path, 60, 0, found=40)
    process(path, 40, 50, found=20)

    losses, metric = sorted(courses_of(read_run(path, "x")), key=lambda one: -len(one.values))

    assert losses.name == "loss of measured steps"
    assert losses.steps.tolist() == list(range(90))
    assert losses.values.tolist() == list(range(90))
    assert (metric.name, metric.steps.tolist()) == ("accuracy", [40, 70])
