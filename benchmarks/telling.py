"""Measure the cost of alerts and sinks to the leader at each exchange, by number of workers.

    python benchmarks/telling.py [--out results.json]

Workers are synthetic, the leader and the sinks are real. The benchmark measures the processor time
of the whole process, which includes threads of the sinks, and that of W&B's service. It also
measures how long the control thread is held. W&B writes offline, MLflow to SQLite. Exchanges are
at least 0.3 s apart, and 5 s in steady state. The budget of evenstride as a whole is 0.25 ms of a
50 ms step and 0.1 ms of a 5 ms step.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import psutil

from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import ConfigError
from evenstride.runtime.coordination.leader import Leader, Reply
from evenstride.runtime.sinks.background_sink import BackgroundSink
from evenstride.runtime.sinks.sink_settings import open_sinks
from evenstride.runtime.sinks.telemetry_board import TelemetryBoard

WORKERS = (2, 8, 64, 1000)
SINKS = ("none", "csv", "tensorboard", "prometheus", "wandb", "mlflow")
EXCHANGES, ROUNDS, STEPS, STEP_S = 40, 5, 10, 0.05
FEW = 8  # exchanges of the sink that takes seconds for many workers


def measured(workers: int, sink: str, folder: Path) -> tuple[float, float]:
    """Return processor time and held time of alerts and sinks per exchange, medians in seconds."""
    where = {
        "csv": folder / f"{workers}.csv",
        "tensorboard": folder / str(workers),
        "wandb": "telling",
        "mlflow": f"sqlite:///{folder / f'{workers}.db'}",
    }
    sinks = [] if sink == "none" else [f"{sink}:{where.get(sink, 0)}"]
    leader = Leader(Control(policy_from_spec("uniform")))
    fleet = tuple(Worker(f"node-{rank}/{rank}") for rank in range(workers))
    leader.form(FleetFormed(0, 0, 32 * workers, fleet))
    opened = open_sinks(sinks)
    leader.board = TelemetryBoard(opened)
    taken_s, held_s, step = [], [], 0
    exchanges = FEW if sink == "mlflow" else EXCHANGES
    for _ in range(ROUNDS):
        round_s, waited_s, service_s = 0.0, 0.0, _of_children_s()
        for _ in range(exchanges):
            replies = [
                Reply(
                    step + STEPS + 1,
                    5,
                    (),
                    Measurements.of(
                        [Observation(rank, 32, step, (STEP_S,) * STEPS, (0.001,) * STEPS)]
                    ),
                )
                for rank in range(workers)
            ]
            step += STEPS
            leader.exchange(step, replies, 5)
            started_s, began_s = time.process_time(), time.perf_counter()
            leader.finish_exchange()
            waited_s += time.perf_counter() - began_s
            while any(isinstance(one, BackgroundSink) and one.waiting for one in opened.values()):
                time.sleep(0.0005)
            round_s += time.process_time() - started_s
        taken_s.append((round_s + _of_children_s() - service_s) / exchanges)
        held_s.append(waited_s / exchanges)
    leader.close({})
    return median(taken_s), median(held_s)


def _of_children_s() -> float:
    """Return the processor time of all child processes so far."""
    times = [one.cpu_times() for one in psutil.Process().children(recursive=True)]
    return float(sum(one.user + one.system for one in times))


def run() -> dict[str, Any]:
    """Return seconds per exchange by sink and number of workers."""
    logging.getLogger("evenstride").setLevel(logging.ERROR)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, WANDB_MODE="offline", WANDB_DIR=folder),
    ):
        for sink in SINKS:
            try:
                found[sink] = {str(n): measured(n, sink, Path(folder)) for n in WORKERS}
            except ConfigError as error:  # a package that is not installed
                print(f"left out: {error}")
    parts = {
        name: {sink: {n: both[place] for n, both in rows.items()} for sink, rows in found.items()}
        for place, name in enumerate(("exchange_s", "held_s"))
    }
    return {"machine": platform.platform(), **parts}


def table(by_sink: dict[str, Any]) -> str:
    """Return figures as a Markdown table."""
    lines = [
        "| sink | " + " | ".join(f"{workers:,} workers" for workers in WORKERS) + " |",
        "|---|" + "---|" * len(WORKERS),
    ]
    for sink, by_workers in by_sink.items():
        name = "log only (alerts)" if sink == "none" else sink
        cells = " | ".join(f"{seconds * 1e3:.2f} ms" for seconds in by_workers.values())
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    found = run()
    if arguments.json:
        print(json.dumps(found))
    else:
        print(f"processor time:\n{table(found['exchange_s'])}")
        print(f"held time of the control thread:\n{table(found['held_s'])}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
