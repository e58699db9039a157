"""Compare the speed-up in each framework with that of a bare DDP loop, in one run.

    python benchmarks/integrations.py [--frameworks bare,lightning] [--rounds 6] [--json] [--out F]

Three processes under CPU limits train the same network with the same global batch: a loop of
DistributedDataParallel and evenstride, Accelerate, Lightning's Trainer, transformers' Trainer, Ray
Train in its local mode, and TensorFlow, whose kernels take other times. Each framework trains
blocks with equal and with balanced shares in turns, all in the same processes. `speed-up` is the
equal step time divided by the balanced one, and `to bare` is the speed-up divided by that of the
bare loop, both from pairs of blocks of one round, with 95 % intervals. `overhead` is what a step
takes longer than in the bare loop.

The exit code is 1 if a framework's speed-up is surely not within 5 % of the bare loop's, and 3 if
an interval of `to bare` is wider than 5 % to either side, so that the run cannot tell.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evenstride.core.arrays import Shares
from evenstride.lab.comparison.paired_ratios import (
    Ratio,
    geometric_mean,
    middle_mean,
    paired_ratio,
)
from evenstride.lab.processes.cpu_limits import open_limits
from evenstride.lab.processes.local_launch import Launch, LaunchProgress, run
from evenstride.lab.processes.speeds import Speeds, check_fit, parse_speeds, usable_cpus
from evenstride.report.wording import Table
from evenstride.runtime.store.store_server import serve_store
from evenstride.trace.read import LineTail

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.integrations_ranks import FRAMEWORKS, NEWS, REPORT, BlockPlan

SCRIPT = Path(__file__).with_name("integrations_ranks.py")
ALLOWED = 0.05
DISTURBED = 3


@dataclass(frozen=True, slots=True)
class FrameworkResult:
    """What a framework reached.

    Args:
        framework: Its name.
        equal_s: Step time with equal shares.
        balanced_s: Step time with balanced shares.
        equal_overhead: Equal step time divided by that of the bare loop.
        balanced_overhead: Balanced step time divided by that of the bare loop.
        speedup: Equal step time divided by balanced step time.
        to_bare: Speed-up divided by that of the bare loop.
        shares: Balanced shares at the end of the last block.
    """

    framework: str
    equal_s: float
    balanced_s: float
    equal_overhead: Ratio
    balanced_overhead: Ratio
    speedup: Ratio
    to_bare: Ratio
    shares: Shares

    @property
    def outside(self) -> bool:
        """Whether the speed-up is surely not within the allowance."""
        low, high = self.to_bare.interval or (self.to_bare.value,) * 2
        return high < 1.0 - ALLOWED or low > 1.0 + ALLOWED

    @property
    def uncertain(self) -> bool:
        """Whether the interval is too wide to tell."""
        half = self.to_bare.half_width
        return half is None or half > ALLOWED


def results(blocks: Sequence[dict[str, Any]], frameworks: Sequence[str]) -> list[FrameworkResult]:
    """Return the result of each framework, compared with the first one."""
    times_s: dict[tuple[str, str], list[tuple[float]]] = {}
    shares: dict[tuple[str, str], Shares] = {}
    for block in sorted(blocks, key=lambda one: one["round"]):
        arm = (block["framework"], block["policy"])
        times_s.setdefault(arm, []).append((middle_mean(block["steps_s"]),))
        shares[arm] = tuple(block["shares"])

    def speedups(name: str) -> list[tuple[float]]:
        arms = times_s[name, "uniform"], times_s[name, "adaptive"]
        return [(equal / even,) for (equal,), (even,) in zip(*arms, strict=True)]

    bare = frameworks[0]
    return [
        FrameworkResult(
            framework=name,
            equal_s=geometric_mean(times_s[name, "uniform"]),
            balanced_s=geometric_mean(times_s[name, "adaptive"]),
            equal_overhead=paired_ratio(times_s[name, "uniform"], times_s[bare, "uniform"]),
            balanced_overhead=paired_ratio(times_s[name, "adaptive"], times_s[bare, "adaptive"]),
            speedup=paired_ratio(times_s[name, "uniform"], times_s[name, "adaptive"]),
            to_bare=paired_ratio(speedups(name), speedups(bare)),
            shares=shares[name, "adaptive"],
        )
        for name in frameworks
    ]


def measure(plan: BlockPlan, speeds: Speeds, folder: Path) -> dict[str, Any]:
    """Train all blocks on limited workers and return the report of rank 0."""
    tail = LineTail(folder / NEWS)

    def look(_: LaunchProgress) -> None:
        for block in tail.records():
            print(
                f"round {block['round'] + 1} {block['framework']:>12} {block['policy']:>8}: "
                f"{middle_mean(block['steps_s']) * 1e3:.1f} ms per step, samples "
                f"{'/'.join(map(str, block['shares']))}, {block['whole_s']:.1f} s",
                file=sys.stderr,
                flush=True,
            )

    limits, caveat = open_limits(len(speeds))
    print(f"CPU limits: {limits.kind}. {caveat}".strip(), file=sys.stderr)
    environment = {
        **dict.fromkeys(("EVENSTRIDE_TRACE", "EVENSTRIDE_MAX_STEPS", "EVENSTRIDE_SYNC"), ""),
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    with contextlib.ExitStack() as stack:
        stack.callback(limits.close)
        groups = 1 + len(list(plan.order()))
        stores = [stack.enter_context(serve_store()) for _ in range(groups)]
        (folder / "plan.json").write_text(json.dumps(asdict(replace(plan, stores=stores))))
        run(Launch((str(SCRIPT), str(folder)), speeds, (), environment), limits, folder, look)
        look(LaunchProgress(0, 0.0))
    report: dict[str, Any] = json.loads((folder / REPORT).read_text())
    return report


def table(found: Sequence[FrameworkResult]) -> str:
    """Return a table of the results, a line per framework."""
    headings = ("framework", "equal", "balanced", "overhead", "speed-up", "to bare", "samples")
    bare = found[0]
    rows = [
        (
            one.framework,
            f"{one.equal_s * 1e3:.0f} ms",
            f"{one.balanced_s * 1e3:.0f} ms",
            f"{(one.equal_s - bare.equal_s) * 1e3:+.1f} / "
            f"{(one.balanced_s - bare.balanced_s) * 1e3:+.1f} ms",
            _shown(one.speedup),
            _shown(one.to_bare, 3) if one is not bare else "",
            "/".join(map(str, one.shares)),
        )
        for one in found
    ]
    return Table(headings, tuple(rows)).text()


def _shown(ratio: Ratio, digits: int = 2) -> str:
    if ratio.interval is None:
        return f"{ratio.value:.{digits}f}"
    low, high = ratio.interval
    return f"{ratio.value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Verbatim)
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    parser.add_argument("--speeds", default="1,0.5,0.2")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", default="18,36", help="measured, with equal, balanced shares")
    parser.add_argument("--cold", default="6,24", help="steps before these")
    parser.add_argument("--step-s", type=float, default=0.16, help="wanted balanced step time")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="file for the JSON, with all step times")
    return parser.parse_args()


def by_policy(text: str) -> dict[str, int]:
    """Return numbers of steps by policy."""
    equal, balanced = map(int, text.split(","))
    return {"uniform": equal, "adaptive": balanced}


def main() -> int:
    """Measure and print. Return the exit code."""
    args, names = parsed(), list[str]()
    for name in dict.fromkeys(["bare", *args.frameworks.split(",")]):
        if name == "bare" or find_spec(name) is not None:
            names.append(name)
        else:
            print(f"{name} is not installed, so it is left out", file=sys.stderr)
    speeds = parse_speeds(args.speeds)
    check_fit(speeds, usable_cpus())
    cold, steps = by_policy(args.cold), by_policy(args.steps)
    plan = BlockPlan(tuple(names), args.rounds, cold, steps, args.step_s)
    with tempfile.TemporaryDirectory(prefix="evenstride-") as folder:
        report = measure(plan, speeds, Path(folder))
    found = results(report["blocks"], names)
    uncertain = any(one.uncertain for one in found[1:])
    plain = {
        "speeds": speeds,
        "global_batch": report["global_batch"],
        "disturbed": uncertain,
        "results": [asdict(one) for one in found],
    }
    if args.out is not None:
        args.out.write_text(json.dumps({**plain, "blocks": report["blocks"]}, indent=1))
    print(json.dumps(plain, indent=1) if args.json else table(found))
    if uncertain:
        print("disturbed: an interval of `to bare` is wider than 5 % to a side", file=sys.stderr)
        return DISTURBED
    return int(any(one.outside for one in found))


class _Verbatim(argparse.RawDescriptionHelpFormatter):
    """Shows the docstring without wrapping."""


if __name__ == "__main__":
    sys.exit(main())
