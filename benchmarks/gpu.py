"""Measure evenstride on one GPU together with CPU cores.

    PYTHONPATH=src python benchmarks/gpu.py [--parts waits,timing] [--json] [--out results.json]
    PYTHONPATH=src python benchmarks/gpu.py --device virtual --quick  # rehearsals without a GPU
    PYTHONPATH=src python benchmarks/gpu.py --device cpu --quick

**No part has been run on a GPU yet.** The rehearsals run the same code: the first three parts on
the virtual device (``tests/virtual_device``), whose times are exact, the others with CPU workers
instead of the card, so that their figures have no meaning.

The first three parts run in one process, whose slow peers are emulated (see `gpu_peers.py`). They
have verdicts:

* ``waits``: DDP and FSDP2, also compiled. Blocks of steps in which collectives are late alternate
  with blocks in which they are not. The busy time must be the same within 3 %. The waiting time
  must grow by as much as the step, and by the delay.
* ``features``: The first steps at a new batch size, a retry after memory ran out, and a checkpoint
  saved and restored. `Stride.mean`, and bfloat16 with a gradient scaler. A CUDA graph of the
  network, and the refusal of a graph of the whole step. See `gpu_features.py`.
* ``price``: Plain PyTorch, the same again (A/A), and evenstride, with networks so small that the
  host is the slower one: DDP, and FSDP2 with 3, 9 and 33 groups of parameters.

The workers of the other parts communicate over Gloo, because NCCL allows one rank per card. So the
benchmark does not show how NCCL's kernels take multiprocessors from a waiting rank. Nor does it
show the effect of a single hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) on the marks, or of a
lost rank with NCCL.

* ``cluster``: One GPU worker and three CPU workers, with 3, 2 and 1 parts of the cores, train a
  small convolutional and a small residual net. Blocks of the equal split, of ``adaptive`` and of
  some fixed splits alternate. The fixed splits are the best one of the calibrated curves, that of
  ``adaptive``, and two neighbours. *Bound* and *efficiency* are those of the demo. The bound is the
  step time of the equal split divided by that of the best split, by the calibrated curves. The
  efficiency is the time of the fastest measured fixed split divided by that of ``adaptive``. The
  benchmark does not compare weights.
* ``timing``: The busy time of a GPU worker as read by evenstride, compared with separate events in
  the same steps. The worker waits in one case, the others wait in the other. Further references are
  a host that waits for the device (as in `evenstride doctor --bench`), and the profiler's kernels.
* ``budget``: Plain PyTorch, the same again (A/A), and evenstride, at a step of 20 ms, with one
  worker and with two equal workers on the card. evenstride's own time may be 0.15 ms there. The
  budget is 0.1 ms at 5 ms and 0.25 ms at 50 ms. The method is that of `overhead.py`.
* ``sharing``: Two workers on the card, without and with matrix products on a second stream of one
  of them.

A run takes at most 9 minutes, because launches have deadlines and do not start too late. The
results file is written after each launch. Exit codes: 1 if a launch failed or a verdict is wrong, 2
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evenstride.runtime.launching.die_with_parent import die_with_parent

if __name__ == "__mp_main__":  # a rank; the script may die during the slow imports below
    die_with_parent()
    if os.environ.get("GPU_BENCHMARK_PID") != str(os.getppid()):
        sys.exit("the benchmark that started this rank has ended")

import numpy as np
import torch

from evenstride._version import __version__
from evenstride.lab.comparison.comparison_result import Curve, calibrated, mean_curves, true_model
from evenstride.lab.doctor.bench_run import compared
from evenstride.testing.ranks import RankPool

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu_features, gpu_peers, gpu_ranks, gpu_verdicts
from benchmarks.gpu_peers import Trial, trials
from benchmarks.gpu_ranks import Job
from benchmarks.gpu_training import Net, steady
from benchmarks.gpu_verdicts import in_words, ratios

Found = dict[str, Any]

ONE_CARD = ("waits", "features", "price")
"""Parts that run in one process, on a GPU or on the virtual device."""
WORKERS = ("cluster", "timing", "budget", "sharing")
"""Parts with several workers, on a GPU and CPU or on CPU alone."""
PARTS = (*ONE_CARD, *WORKERS)
OF_DEVICE = {"cuda": PARTS, "cpu": WORKERS, "virtual": ONE_CARD}
SECONDS = {"cluster": 45.0, "timing": 30.0, "budget": 30.0, "sharing": 30.0}
QUICK_SECONDS = {"cluster": 10.0, "timing": 8.0, "budget": 5.0, "sharing": 8.0}
LIMIT_S = 525.0  # of a whole run
START_S = 90.0  # of a launch in addition to measuring: processes, torch, CUDA, warm-up
TIMING_AIM, UNDER = 0.03, 0.01
BUDGET_AT_S = ((5e-3, 50e-3), (0.1e-3, 0.25e-3))  # step times, and the own time allowed at each


def launches(
    part: str, device: str, cores: Sequence[int], *, quick: bool
) -> Mapping[str, Job | Trial]:
    """Return the launches of a part, by name.

    Args:
        part: One of `PARTS`.
        device: Device of the GPU workers: ``cuda:0``, or in a rehearsal ``cpu`` or ``virtual``.
        cores: Numbers of the cores to use.
        quick: Whether to use small nets and short times.
    """
    if part in ONE_CARD:
        return trials(part, device, cores, quick=quick)
    seconds = (QUICK_SECONDS if quick else SECONDS)[part]
    width, few = (8, 10) if quick else (32, 40)
    block_s = 0.3 if quick else 0.8

    def job(devices: Sequence[str], split: list[tuple[int, ...]], net: Net, step_s: float) -> Job:
        equal_s = 0.2 if quick else 0.8
        return Job(tuple(devices), tuple(split), net, seconds, step_s, equal_s, block_s, few)

    if part == "cluster":
        split = cluster_cores(cores)
        devices = (device, *["cpu"] * (len(split) - 1))
        return {f"cluster {n}": job(devices, split, Net(n, width), 0.05) for n in ("cnn", "resnet")}
    if part == "timing":
        split = divided(cores, (1, 3))
        return {"timing": job((device, "cpu"), split, Net("cnn", 2 * width), 0.03)}
    two, net = divided(cores, (1, 1)), Net("cnn" if quick else "resnet", width)
    if part == "budget":
        return {
            "budget one": job((device,), two[:1], net, 0.02),
            "budget two": job((device, device), two, net, 0.02),
        }
    return {"sharing": job((device, device), two, net, 0.03)}


def cluster_cores(cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the cores of the GPU worker and of the CPU workers, such as 2, 6, 4 and 2 of 16.

    The GPU worker gets an eighth of the cores. Of 8 or more cores, another eighth stays free. With
    fewer than 5 cores there are two CPU workers, which share one core if there are only two.
    """
    mine = max(1, len(cores) // 8)
    rest = cores[mine : len(cores) - len(cores) // 8]
    return [tuple(cores[:mine]), *divided(rest or cores, (3, 2, 1) if len(cores) > 4 else (2, 1))]


def divided(cores: Sequence[int], weights: Sequence[int]) -> list[tuple[int, ...]]:
    """Divide the cores among workers, at least one for each. Workers share cores if necessary."""
    if len(cores) < len(weights):
        return [(cores[k % len(cores)],) for k in range(len(weights))]
    ends, total, given = list[int](), sum(weights), 0
    for k, weight in enumerate(weights):
        given += weight
        left = len(weights) - k - 1  # workers that still need a core
        end = max(round(len(cores) * given / total), (ends[-1] if ends else 0) + 1)
        ends.append(min(end, len(cores) - left))
    return [tuple(cores[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def spread(times_s: Sequence[float]) -> Found:
    """Return median, quartiles and number of the blocks' step times."""
    low, middle, high = np.quantile(times_s, (0.25, 0.5, 0.75))
    return {"step_s": float(middle), "quartiles_s": (float(low), float(high)), "n": len(times_s)}


def paired(slower_s: Sequence[float], faster_s: Sequence[float]) -> Found:
    """Return the median ratio of blocks of the same rounds, with its 95 % interval."""
    return ratios([a / b for a, b in zip(slower_s, faster_s, strict=True)])


def cluster_figures(found: Found) -> Found:
    """Return the figures of the cluster part."""
    both: list[list[Curve]] = [[dict(c) for c in found[when]] for when in ("before", "after")]
    before, after = both
    blocks, batch = found["blocks"], found["global_batch"]
    hope = calibrated(before, after, (1.0,) * len(before), batch, found["communication_s"])
    arms = {policy: spread(times_s) for policy, times_s in blocks.items()}
    fixed = [policy for policy in arms if policy.startswith("static:")]
    oracle = min(fixed, key=lambda policy: arms[policy]["step_s"])
    model = true_model(mean_curves(before, after))
    speedup = paired(blocks["uniform"], blocks["adaptive"])
    return {
        "arms": arms,
        "speedup": speedup,
        "bound": hope.bound,
        "of_bound": speedup["ratio"] / hope.bound,
        "oracle": oracle,
        "efficiency": paired(blocks[oracle], blocks["adaptive"]),
        "speeds": hope.achieved_speeds,
        "drift": hope.drift,
        "disturbed": hope.disturbed,
        # Time of worker 0 without the others, to show what they contribute.
        "alone_s_model": float(model.fixed_s[0] + model.per_sample_s[0] * batch),
    }


def timing_figures(found: Found) -> Found:
    """Return the figures of the timing part."""
    regimes = {}
    for name in ("others wait", "worker 0 waits"):
        mine = found[name]
        one: Found = compared(mine["times_s"], dict(mine["read_s"]), mine["cold_steps"])
        read = mine["profiled_read_s"]
        filled = mine["kernels_s"] / float(np.mean(read)) if read and mine["kernels_s"] else None
        regimes[name] = {**one, "shares": mine["shares"], "kernels_of_read": filled}
    regimes["host waits"] = {**found["host"][0], "kernels_of_read": None}
    for one in regimes.values():
        one["within"] = one["ratio"] is not None and abs(one["ratio"] - 1.0) <= TIMING_AIM
    return regimes


def budget_figures(found: Found) -> Found:
    """Return the figures of the budget part."""
    blocks = found["blocks"]
    arms = {name: spread(times_s) for name, times_s in blocks.items()}
    ratio, control = (paired(blocks[name], blocks["plain"]) for name in ("evenstride", "again"))
    own_s, allowed_s = max(found["own_s"]), float(np.interp(arms["plain"]["step_s"], *BUDGET_AT_S))
    return {
        "arms": arms,
        "ratio": ratio,
        "control": control,
        "under_1_percent": ratio["interval"][1] - control["ratio"] < UNDER,
        "own_s": own_s,
        "budget_s": allowed_s,
        "within_budget": own_s <= allowed_s,
    }


def sharing_figures(found: Found) -> Found:
    """Return the figures of the sharing part."""
    return {
        phase: {
            "arms": {policy: spread(t) for policy, t in found[phase]["blocks"].items()},
            "speedup": paired(
                found[phase]["blocks"]["uniform"], found[phase]["blocks"]["adaptive"]
            ),
            "shares": found[phase]["shares"],
        }
        for phase in ("calm", "burdened")
    }


def lines(name: str, done: Found) -> list[str]:
    """Return the lines of a launch, from the result of `perform`."""
    if "failed" in done:
        return [f"--- {name} FAILED: {done['failed']}"]
    found, figures = done["found"], done["figures"]
    place = f"{' + '.join(found['devices'])}{', ' if found['backend'] else ''}{found['backend']}"
    describe = _LINES[name.split()[0]]
    return [f"--- {name}: {place}; took {done['took_s']:.0f} s", *describe(found, figures)]


def _cluster_lines(found: Found, figures: Found) -> list[str]:
    rows = [f"{policy:32} {_block(arm)}" for policy, arm in figures["arms"].items()]
    disturbed = ", DISTURBED" if figures["disturbed"] else ""
    return [
        f"batch {found['global_batch']}, shares of adaptive {_shares(found['shares'])}, changed "
        f"{found['changes']} time(s); speeds {_shares(figures['speeds'])}",
        *rows,
        f"speed-up {in_words(figures['speedup'])}, bound {figures['bound']:.3f}, "
        f"{figures['of_bound']:.3f} of it; efficiency {in_words(figures['efficiency'])} against "
        f"{figures['oracle']}",
        f"all-reduce alone {_ms(found['communication_s'])}; worker 0 alone, by its curve, "
        f"{_ms(figures['alone_s_model'])}; drift {figures['drift']:.1%}{disturbed}",
    ]


def _timing_lines(_: Found, figures: Found) -> list[str]:
    rows = []
    for name, one in figures.items():
        if one["ratio"] is None:
            rows.append(f"{name:15} true {_ms(one['true_s'])}; evenstride read no time")
            continue
        filled = one["kernels_of_read"]
        kernels = f"; kernels fill {filled:.3f} of it" if filled is not None else ""
        verdict = "within 3 %" if one["within"] else "NOT within 3 %"
        rows.append(
            f"{name:15} busy time of worker 0 {_ms(one['true_s'])} of {_ms(one['step_s'])}, read "
            f"{_ms(one['read_s'])}, ratio {one['ratio']:.4f}: {verdict}{kernels}"
        )
    return rows


def _budget_lines(found: Found, figures: Found) -> list[str]:
    kept = "kept" if figures["within_budget"] else "EXCEEDED"
    return [
        f"plain {_block(figures['arms']['plain'])}, batch {found['global_batch']}",
        f"own time {_ms(figures['own_s'])}, budget {_ms(figures['budget_s'])}: {kept}",
        f"against plain {in_words(figures['ratio'])}, A/A {in_words(figures['control'])}; "
        f"under 1 %: {'met' if figures['under_1_percent'] else 'unresolved'}",
    ]


def _sharing_lines(found: Found, figures: Found) -> list[str]:
    rows = [f"batch {found['global_batch']}"]
    for phase, one in figures.items():
        equal, ours = one["arms"]["uniform"], one["arms"]["adaptive"]
        rows.append(
            f"{phase:9} equal {_block(equal)}, adaptive {_block(ours)}: speed-up "
            f"{in_words(one['speedup'])}, shares {_shares(one['shares'])}"
        )
    return rows


_WORK: dict[str, Callable[[int, Any], Found]] = {
    "waits": gpu_peers.waits,
    "features": gpu_features.features,
    "price": gpu_peers.price,
    "cluster": gpu_ranks.cluster,
    "timing": gpu_ranks.timing,
    "budget": gpu_ranks.budget,
    "sharing": gpu_ranks.sharing,
}
_FIGURES: dict[str, Callable[[Found], Found]] = {
    "waits": gpu_verdicts.waits_figures,
    "features": gpu_verdicts.features_figures,
    "price": gpu_verdicts.price_figures,
    "cluster": cluster_figures,
    "timing": timing_figures,
    "budget": budget_figures,
    "sharing": sharing_figures,
}
_LINES: dict[str, Callable[[Found, Found], list[str]]] = {
    "waits": gpu_verdicts.waits_lines,
    "features": gpu_verdicts.features_lines,
    "price": gpu_verdicts.price_lines,
    "cluster": _cluster_lines,
    "timing": _timing_lines,
    "budget": _budget_lines,
    "sharing": _sharing_lines,
}


def _block(arm: Found) -> str:
    low, high = arm["quartiles_s"]
    return f"{_ms(arm['step_s'])} ({low * 1e3:.2f} to {high * 1e3:.2f}, {arm['n']} blocks)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _shares(values: Sequence[float]) -> str:
    return "/".join(f"{value:g}" for value in values)


def perform(pool: RankPool, name: str, job: Job | Trial, left_s: float) -> Found:
    """Run one launch. Return the findings of its ranks with figures, or the reason of a failure.

    Args:
        pool: Pool of processes. It ends those of a failed launch.
        name: Name of the launch, starting with its part.
        job: Job of the ranks.
        left_s: Remaining time of the run. With too little, the launch does not start.
    """
    part, started_s = name.split()[0], time.monotonic()
    result: Found = {"job": asdict(job)}
    if left_s < job.seconds + START_S / 3:
        return {
            **result,
            "failed": f"only {left_s:.0f} s are left, too few to start; give fewer --parts",
        }
    try:
        timeout_s = min(3 * job.seconds + START_S, left_s)
        found = pool.run(_WORK[part], len(job.devices), job, timeout_s=timeout_s)[0]
        result |= {"found": found, "figures": _FIGURES[part](found)}
    except Exception as error:  # the other parts may still succeed
        result["failed"] = f"{type(error).__name__}: {error}"
    return {**result, "took_s": time.monotonic() - started_s}


def machine(device: str, *, quick: bool) -> Found:
    """Return date, hardware and versions of the measurement."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(0)
        if device == "cuda:0"
        else f"{device} (a rehearsal)",
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "evenstride": __version__,
        "quick": quick,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit if it is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    some = f"some of {', '.join(PARTS)}, separated by commas"
    parser.add_argument("--parts", help=f"{some}; default: all that the device can run")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu", "virtual"),
        default="cuda",
        help="rehearse without a GPU: virtual for the first three parts, cpu for the others",
    )
    parser.add_argument("--quick", action="store_true", help="use small networks and short times")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--out", type=Path, help="write the figures to this file, as JSON")
    args = parser.parse_args(arguments)
    known = OF_DEVICE[args.device]
    args.parts = args.parts.split(",") if args.parts else list(known)
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"unknown part {part!r}: expected one of {', '.join(PARTS)}")
        if part not in known:
            parser.error(f"part {part!r} cannot run on {args.device}; {', '.join(known)} can")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested parts. Return the exit code."""
    args = parse(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "this benchmark needs an NVIDIA GPU or an AMD GPU, and a torch built for it, but "
            "torch found none; rehearse it without one by --device virtual --quick and "
            "--device cpu --quick",
            file=sys.stderr,
        )
        return 2
    device = "cuda:0" if args.device == "cuda" else args.device
    steady()
    end_s = time.monotonic() + LIMIT_S
    results: Found = {**machine(device, quick=args.quick), "launches": {}}
    about = ", ".join(f"{key} {value}" for key, value in results.items() if key != "launches")
    output = sys.stderr if args.json else sys.stdout
    print(about, file=output)
    cores = sorted(os.sched_getaffinity(0))
    with RankPool() as pool:
        for part in args.parts:
            for name, job in launches(part, device, cores, quick=args.quick).items():
                done = perform(pool, name, job, end_s - time.monotonic())
                results["launches"][name] = done
                print("\n".join(lines(name, done)), file=output, flush=True)
                if args.out:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(results, indent=1) + "\n")
    if args.json:
        print(json.dumps(results))
    return 1 if any(map(bad, results["launches"].values())) else 0


def bad(done: Found) -> bool:
    """Return whether a launch failed, or has found something wrong."""
    return "failed" in done or bool(done["figures"].get("wrong"))


if __name__ == "__main__":
    sys.exit(main())
