"""Measure the cost of alerts and sinks to the leader at each exchange, by number of workers.

    python benchmarks/telling.py [--out results.json]

Workers are synthetic, the leader and the sinks are real. The benchmark measures the processor time
of the whole process, which includes threads of the sinks. Exchanges are at least 0.3 s apart, and
5 s in steady state. The budget of evenstride as a whole is 0.25 ms of a 50 ms step and 0.1 ms of a
5 ms step.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.runtime.coordination.leader import Leader, Reply
from evenstride.runtime.sinks.sink_settings import open_sinks
from evenstride.runtime.sinks.telemetry_board import TelemetryBoard

WORKERS = (2, 8, 64, 1000)
SINKS = ("none", "csv", "tensorboard", "prometheus")
EXCHANGES, ROUNDS, STEPS, STEP_S = 40, 5, 10, 0.05


def measured(workers: int, sink: str, folder: Path) -> float:
    """Return the processor time of alerts and sinks per exchange in seconds, a median of rounds."""
    where = {"csv": folder / f"{workers}.csv", "tensorboard": folder / str(workers)}
    sinks = [] if sink == "none" else [f"{sink}:{where.get(sink, 0)}"]
    leader = Leader(Control(policy_from_spec("uniform")))
    fleet = tuple(Worker(f"node-{rank}/{rank}") for rank in range(workers))
    leader.form(FleetFormed(0, 0, 32 * workers, fleet))
    leader.board = TelemetryBoard(open_sinks(sinks))
    taken_s, step = [], 0
    for _ in range(ROUNDS):
        round_s = 0.0
        for _ in range(EXCHANGES):
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
            started_s = time.process_time()
            leader.show()
            round_s += time.process_time() - started_s
        taken_s.append(round_s / EXCHANGES)
    leader.close({})
    return median(taken_s)


def run() -> dict[str, Any]:
    """Return seconds per exchange by sink and number of workers."""
    logging.getLogger("evenstride").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            sink: {str(workers): measured(workers, sink, Path(folder)) for workers in WORKERS}
            for sink in SINKS
        }
    return {"machine": platform.platform(), "exchange_s": found}


def table(found: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| sink | " + " | ".join(f"{workers:,} workers" for workers in WORKERS) + " |",
        "|---|" + "---|" * len(WORKERS),
    ]
    for sink, by_workers in found["exchange_s"].items():
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
    print(json.dumps(found) if arguments.json else table(found))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
