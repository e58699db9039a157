"""Draw the picture at the top of the README: busy and waiting times before and after balancing.

    evenstride demo --out runs/demo
    python benchmarks/picture.py runs/demo docs/images/before-after.svg

The picture shows measurements: each block is the busy or waiting time of one worker in one step,
from the two traces of the demo. Both panels show the same length of time.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from evenstride.core.time_model.observation import median
from evenstride.trace.read import read_records

Times = tuple[float, float]
"""Busy time and waiting time of a worker in a step, in seconds."""


class _WorkerStep(NamedTuple):
    """The record of one worker in one step: samples, and both times in seconds."""

    worker: int
    share: int
    busy_s: float
    wait_s: float


WIDTH, LEFT, EDGE = 880, 130, 24
ROW, GAP, TOP = 26, 8, 58

STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }  text { fill: #1f2328; font: 14px sans-serif }
  .head { font-weight: bold; font-size: 16px }  .small { font-size: 12px }
  .busy { fill: #0072B2 }  .wait { fill: #E69F00 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #30363d }  text { fill: #e6edf3 }
    .busy { fill: #56B4E9 }
  }"""
"""Blue and orange of Okabe and Ito differ for all kinds of colour vision, and in lightness."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The end of a run: its last whole steps and their shares.

    Args:
        steps: For each step, one pair of times per worker.
        shares: Shares of the last step.
    """

    steps: list[list[Times]]
    shares: list[int]

    @property
    def step_s(self) -> float:
        """Median step time in seconds."""
        return median(tuple(length_s(step) for step in self.steps))


def length_s(step: list[Times]) -> float:
    """Return the step time, which ends when the last worker has worked and waited."""
    return max(busy_s + wait_s for busy_s, wait_s in step)


def last_steps(run: Path, count: int) -> Measured:
    """Return the last steps with a whole global batch that all workers reported.

    Args:
        run: Folder or file of a trace.
        count: Number of steps, at least 1.

    Raises:
        SystemExit: The trace has fewer such steps.
        TraceError: The trace cannot be read.
    """
    times, batch = _by_step(run)
    steps = [seen for _, seen in sorted(times.items()) if sum(one.share for one in seen) == batch]
    if not 1 <= count <= len(steps):
        raise SystemExit(
            f"invalid number of steps {count}: {run} has {len(steps)} steps of a whole batch"
        )
    steps = steps[-count:]
    return Measured(
        [[(one.busy_s, one.wait_s) for one in seen] for seen in steps],
        [one.share for one in steps[-1]],
    )


def _by_step(run: Path) -> tuple[dict[int, list[_WorkerStep]], int]:
    """Return the records of each step in order of the workers, and the global batch."""
    times: dict[int, list[_WorkerStep]] = defaultdict(list)
    batch = 0
    for record in read_records(run):
        event = record.get("event", {})
        batch = event.get("global_batch", batch)
        for seen in event.get("observations", ()):
            for offset, pair in enumerate(zip(seen["busy_s"], seen["wait_s"], strict=True)):
                one = _WorkerStep(seen["worker"], seen["share"], *pair)
                times[seen["first_step"] + offset].append(one)
    return {step: sorted(seen) for step, seen in times.items()}, batch


def panel(measured: Measured, title: str, top: float, names: list[str], shown_s: float) -> str:
    """Return the rows and the heading of one run as SVG."""
    per_s = (WIDTH - LEFT - EDGE) / shown_s
    parts = [f'<text class="head" x="{EDGE}" y="{top - 12}">{title}</text>']
    for row, name in enumerate(names):
        y = top + row * (ROW + GAP)
        parts.append(f'<text x="{EDGE}" y="{y + 18}">{name}</text>')
        parts += _row(measured.steps, row, y, per_s, shown_s)
    return "\n".join(parts)


def _row(steps: list[list[Times]], row: int, y: float, per_s: float, shown_s: float) -> list[str]:
    parts, start_s = [], 0.0
    for step in steps:
        if start_s >= shown_s:
            break
        end_s = min(start_s + length_s(step), shown_s)
        own_s = min(start_s + step[row][0], shown_s)
        # A worker that was busy to the end still waited for the network. A thin gap divides steps.
        for kind, from_s, to_s in (("busy", start_s, own_s), ("wait", own_s, end_s)):
            width = (to_s - from_s) * per_s - (1 if to_s == end_s else 0)
            if width > 0:
                x = LEFT + from_s * per_s
                parts.append(
                    f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}"/>'
                )
        start_s = end_s
    return parts


def picture(before: Measured, after: Measured, names: list[str], shown_s: float) -> str:
    """Return the picture as SVG, in colours for light and dark pages."""
    second = TOP + len(names) * (ROW + GAP) + 46
    bottom = second + len(names) * (ROW + GAP) + 12
    titles = [_title("Equal batches", before), _title("Balanced by evenstride", after)]
    legend = (
        f'<rect class="busy" x="{LEFT}" y="{bottom}" width="14" height="14"/>'
        f'<text class="small" x="{LEFT + 20}" y="{bottom + 12}">works</text>'
        f'<rect class="wait" x="{LEFT + 80}" y="{bottom}" width="14" height="14"/>'
        f'<text class="small" x="{LEFT + 100}" y="{bottom + 12}">waits for the others</text>'
        f'<text class="small" x="{WIDTH - EDGE}" y="{bottom + 12}" text-anchor="end">'
        f"both show the same {shown_s:.1f} s</text>"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 30}" '
            f'role="img" aria-label="{" ".join(titles)}">',
            f"<title>{' '.join(titles)}</title>",
            f"<style>{STYLE}\n</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{bottom + 29}" '
            'rx="8"/>',
            panel(before, titles[0], TOP, names, shown_s),
            panel(after, titles[1], second, names, shown_s),
            legend,
            "</svg>\n",
        ]
    )


def _title(what: str, measured: Measured) -> str:
    shares = " / ".join(map(str, measured.shares))
    return f"{what}: {shares} samples, {measured.step_s * 1e3:.0f} ms a step."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=Path, help="folder of a demo with both traces")
    parser.add_argument("out", type=Path, help="SVG file to write")
    parser.add_argument(
        "--names", default="1 core,half a core,a fifth", help="names of the workers, in order"
    )
    parser.add_argument("--steps", type=int, default=4, help="steps of the equal run to show")
    args = parser.parse_args()
    before = last_steps(args.demo / "uniform.jsonl", args.steps)
    shown_s = sum(map(length_s, before.steps))
    after = last_steps(args.demo / "adaptive.jsonl", 4 * args.steps)
    args.out.write_text(picture(before, after, args.names.split(","), shown_s))


if __name__ == "__main__":
    main()
