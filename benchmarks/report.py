"""Measure the time and the page size of the report of a long run.

    python benchmarks/report.py [--steps 100000] [--keep FOLDER]

It creates a trace of 100,000 steps of 4 workers and runs ``evenstride report`` on it. The limits
are 20 s and 6 MB. The exit code is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.report_runs import Made, make

MOST_S, MOST_BYTES = 20.0, 6_000_000
SPEEDS = (1.0, 0.9, 0.8, 0.7)
SLOWED = (1.0, 0.9, 0.3, 0.7)


def long_run(steps: int) -> Made:
    """Return a run in which worker 2 is slow from one fifth to four fifths of the steps."""
    return Made(
        steps=steps,
        speeds=SPEEDS,
        changes=((steps // 5, SLOWED), (4 * steps // 5, SPEEDS)),
        spikes=tuple((step, 1) for step in range(977, steps, 9973)),
        evaluated=steps // 50,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--keep", type=Path, help="folder for trace and page (default: temporary)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        trace, page = folder / "trace.jsonl", folder / "report.html"
        if not trace.exists():
            make(long_run(given.steps), trace)
        command = [sys.executable, "-m", "evenstride", "report", str(trace), "-o", str(page)]
        began_s = time.perf_counter()
        subprocess.run([*command, "--force"], check=True, stdout=subprocess.DEVNULL)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        took_s, size = time.perf_counter() - began_s, page.stat().st_size
        kept = took_s <= MOST_S and size <= MOST_BYTES
        figures: dict[str, float] = {"steps": given.steps, "trace_bytes": trace.stat().st_size}
        figures |= {"took_s": round(took_s, 2), "cpu_s": round(used.ru_utime + used.ru_stime, 2)}
        print(json.dumps({**figures, "page_bytes": size, "kept": kept}))
    sys.exit(not kept)


if __name__ == "__main__":
    main()
