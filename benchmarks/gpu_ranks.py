"""The ranks of `gpu.py`: one function per part, with the same collective calls on all ranks.

Each function returns JSON types. `gpu.py` computes the figures from them, without processes.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_training import Arm, Bench, Images, Net, between_s, mark, rival, take

from evenstride.core.fleet import Shares
from evenstride.lab.comparison.comparison_result import best_split
from evenstride.lab.doctor.bench_ranks import BenchBudget, BenchRank
from evenstride.lab.doctor.bench_run import RandomRows, in_turns
from evenstride.lab.doctor.bench_run import choose_batch as choose_rows
from evenstride.lab.doctor.bench_run import timing as timing_by_host
from evenstride.trace.read import TRACE_NAME
from evenstride.trace.run_log import RunLog

Found = dict[str, Any]

_FEWEST = 8  # samples per worker, so that shares are fine enough
_MOST = 16_384  # samples of one worker


@dataclass(frozen=True, slots=True)
class Job:
    """One launch.

    Args:
        devices: Devices of the ranks, such as ``cuda:0``, in rank order.
        cores: Cores of the ranks.
        net: Net to train.
        seconds: Time to spend on measuring.
        step_s: Wanted time of a balanced step.
        equal_s: Longest acceptable step of the equal split.
        block_s: Wanted time of a block of steps of one arm.
        cold_steps: Steps of an arm before it is measured.
    """

    devices: tuple[str, ...]
    cores: tuple[tuple[int, ...], ...]
    net: Net
    seconds: float
    step_s: float
    equal_s: float = 1.0
    block_s: float = 0.8
    cold_steps: int = 40


def cluster(rank: int, job: Job) -> Found:
    """Return blocks of equal, adaptive and some fixed splits, and curves before and after them."""
    place = take(rank, job.devices, job.cores)
    bench = Bench(place, job.net)
    rates = place.gathered(bench.samples_per_s(job.step_s, _MOST))
    data = Images(batch_for(rates, job.step_s, job.equal_s), place.device)
    sizes, size_s = calibration_sizes(rates[rank], rates, data.batch), job.seconds / 40
    before = place.gathered(bench.curve(sizes, size_s))
    communication_s = bench.communication_s()
    arms = {policy: Arm(place, job.net, data, policy) for policy in ("uniform", "adaptive")}
    arms["uniform"].block(2)
    arms["adaptive"].block(job.cold_steps)
    best = best_split([dict(curve) for curve in before], data.batch)
    now = arms["adaptive"].stride
    assert now is not None, "this arm has a policy"
    for split in fixed_splits(best, place.agreed(now.shares)):
        policy = "static:" + ",".join(map(str, split))
        arms[policy] = Arm(place, job.net, data, policy)
        arms[policy].block(5)
    blocks = in_blocks(place, arms, 0.7 * job.seconds, job.block_s)
    after = place.gathered(bench.curve(sizes, size_s))
    summary, shares = now.summary(), place.agreed(now.shares)
    for arm in arms.values():
        arm.close()
    return {
        **described(place, data.batch),
        "rates": rates,
        "before": before,
        "after": after,
        "communication_s": communication_s,
        "blocks": blocks,
        "shares": shares,
        "changes": summary.changes,
    }


def sharing(rank: int, job: Job) -> Found:
    """Return blocks of equal and adaptive splits, without and with a rival of rank 1."""
    place = take(rank, job.devices, job.cores)
    rates = place.gathered(Bench(place, job.net).samples_per_s(job.step_s, _MOST))
    data = Images(batch_for(rates, job.step_s, job.equal_s), place.device)
    arms = {policy: Arm(place, job.net, data, policy) for policy in ("uniform", "adaptive")}
    stride = arms["adaptive"].stride
    assert stride is not None, "this arm has a policy"

    def phase() -> Found:
        for arm in arms.values():
            arm.block(job.cold_steps)
        blocks = in_blocks(place, arms, 0.4 * job.seconds, job.block_s)
        return {"blocks": blocks, "shares": place.agreed(stride.shares)}

    calm = phase()
    if rank == 1:
        with rival(place.device):
            burdened = phase()
            place.start_s()  # no rank still measures when the rival ends
    else:
        burdened = phase()
        place.start_s()
    for arm in arms.values():
        arm.close()
    return {**described(place, data.batch), "calm": calm, "burdened": burdened}


def budget(rank: int, job: Job) -> Found:
    """Return blocks of plain training, the same again, and evenstride, with its own time."""
    place = take(rank, job.devices, job.cores)
    batch = batch_of_step(place, job)
    data = Images(batch, place.device)
    arms = {
        name: Arm(place, job.net, data, policy)
        for name, policy in (("plain", None), ("again", None), ("evenstride", "adaptive"))
    }
    for arm in arms.values():
        arm.block(job.cold_steps)
    own_before_s, steps_before = arms["evenstride"].own_s()
    blocks = in_blocks(place, arms, job.seconds, job.block_s)
    own_after_s, steps_after = arms["evenstride"].own_s()
    for arm in arms.values():
        arm.close()
    own_s = (own_after_s - own_before_s) / (steps_after - steps_before)
    return {**described(place, batch), "blocks": blocks, "own_s": place.gathered(own_s)}


def timing(rank: int, job: Job) -> Found:
    """Return true and read busy times of rank 0 in each step, by several references.

    ``host``: `evenstride.lab.doctor.bench_run.timing`, which waits for the device at every
    gradient.
    ``worker 0 waits``, ``others wait``: separate events in the stream of normal steps, a few of
    them under torch's profiler.
    """
    place = take(rank, job.devices, job.cores)
    plan = BenchBudget(timing_s=0.3 * job.seconds, step_s=job.step_s, block_s=0.4 * job.block_s)
    by_host = timing_by_host(place, plan, RandomRows(choose_rows(place, plan), place.device))
    rates = place.gathered(Bench(place, job.net).samples_per_s(job.step_s, _MOST))
    regimes = {"others wait": (1.0, 0.3), "worker 0 waits": (0.3, 1.0)}
    found: Found = {"host": by_host}
    for name, (mine, others) in regimes.items():
        wanted_s = [job.step_s * (mine if k == 0 else others) for k in range(len(rates))]
        shares = [max(1, round(r * t)) for r, t in zip(rates, wanted_s, strict=True)]
        found[name] = _regime(place, job, tuple(shares))
    return {**described(place, 0), **found}


def _regime(place: BenchRank, job: Job, shares: Shares) -> Found:
    """Return true and read times of rank 0 under fixed shares, and the profiler's kernel time."""
    policy, data = "static:" + ",".join(map(str, shares)), Images(sum(shares), place.device)
    with tempfile.TemporaryDirectory(prefix="evenstride-gpu-") as folder:
        trace = Path(folder) / TRACE_NAME if place.rank == 0 else None
        arm = Arm(place, job.net, data, policy, trace)
        steps = max(10, round(job.block_s / job.step_s))
        times_s = marked_steps(arm, steps)  # cold
        kernels_s, profiled_s = profiled_steps(arm, steps)
        profiled = range(steps, 2 * steps)
        times_s += profiled_s
        # The exchanges during these steps report the steps above.
        for _ in in_turns(place, 0.3 * job.seconds, 1):
            times_s += marked_steps(arm, steps)
        arm.close()
        read = read_s(trace) if trace is not None else {}
    found = {
        "shares": shares,
        "cold_steps": steps,
        "times_s": times_s,
        "read_s": sorted(read.items()),
        "kernels_s": kernels_s,
        "profiled_read_s": [read[step] for step in profiled if step in read],
    }
    return place.agreed(found)


def marked_steps(arm: Arm, steps: int) -> list[tuple[float, float]]:
    """Train some steps. Return the busy time and the whole time of each in seconds.

    Separate marks in the stream are read after the last step. The busy time is the whole time
    except the time from this rank's last gradient to the end of the backward pass. The hooks are on
    the parameters, where `Stride` has none.
    """
    place, ready, marks = arm.place, list[Any](), list[tuple[Any, Any, Any]]()

    def note(_: Any) -> None:
        ready[:] = [mark(place)]

    hooks = [
        parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        for parameter in arm.net.parameters()
    ]
    place.start_s()
    last = mark(place)
    ends = [last]
    for _ in range(steps):
        arm.backward()
        averaged = mark(place)
        arm.update()
        marks.append((ready[0], averaged, mark(place)))
        ends.append(marks[-1][2])
    place.now_s()
    for hook in hooks:
        hook.remove()
    return [
        (between_s(start, end) - between_s(grads, averaged), between_s(start, end))
        for start, (grads, averaged, end) in zip(ends, marks, strict=False)
    ]


def profiled_steps(arm: Arm, steps: int) -> tuple[float | None, list[tuple[float, float]]]:
    """Train some steps. Return the computing time of rank 0's device per step, and step times.

    torch's profiler measures the computing time. It is ``None`` if the profiler sees no kernel, and
    on other ranks. The step times are those of `marked_steps`.
    """
    if arm.place.rank != 0:
        return None, marked_steps(arm, steps)
    cuda = arm.place.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as profile:
        times_s = marked_steps(arm, steps)
    events = profile.events() or ()
    spans = [(e.time_range.start, e.time_range.end) for e in events if _computes(e, cuda=cuda)]
    return (covered(spans) / 1e6 / steps if spans else None), times_s


def _computes(event: Any, *, cuda: bool) -> bool:
    """Return whether a profiled event is computation, not a copy, a wait or an annotation."""
    if not cuda:
        return bool(event.name.startswith("aten::"))
    on_card = str(event.device_type).endswith("CUDA")
    stretch = getattr(event, "is_user_annotation", False)
    return on_card and not stretch and not event.name.startswith(("Memcpy", "Memset"))


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of some spans.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def read_times_s(trace: Path) -> dict[int, tuple[float, float]]:
    """Return the reported busy and waiting times of worker 0, by step."""
    read: dict[int, tuple[float, float]] = {}
    for seen in RunLog(trace).observations:
        if seen.worker == 0 and seen.modelled:
            times_s = zip(seen.busy_s, seen.wait_s, strict=True)
            read |= dict(enumerate(times_s, start=seen.first_step))
    return read


def read_s(trace: Path) -> dict[int, float]:
    """Return the reported busy times of worker 0, by step."""
    return {step: busy_s for step, (busy_s, _) in read_times_s(trace).items()}


def in_blocks(
    place: BenchRank, arms: dict[str, Arm], seconds: float, block_s: float
) -> dict[str, list[float]]:
    """Run blocks of all arms for some seconds, and return their step times.

    A round has one block of every arm, in random order. Blocks of the same round form pairs.
    """
    names, numbers, shuffler = list(arms), dict[str, int](), random.Random(0)
    for name in names:
        step_s = place.agreed(arms[name].block(3))
        numbers[name] = min(max(round(block_s / step_s), 3), 200)
    times_s: dict[str, list[float]] = {name: [] for name in names}
    for _ in in_turns(place, seconds, 1):
        shuffler.shuffle(names)  # in the same order on all ranks
        for name in names:
            times_s[name].append(arms[name].block(numbers[name]))
    return place.agreed(times_s)


def batch_of_step(place: BenchRank, job: Job) -> int:
    """Return the global batch whose plain, equal step takes ``job.step_s``. A collective call."""
    rates = place.gathered(Bench(place, job.net).samples_per_s(job.step_s, _MOST))
    share = max(1, round(job.step_s * min(rates)))
    for _ in range(3):
        data = Images(share * place.world_size, place.device)
        arm = Arm(place, job.net, data, None)
        arm.block(3)
        now_s = place.agreed(arm.block(10))
        arm.close()
        share = min(max(1, round(share * min(job.step_s / now_s, 4.0))), _MOST)
    return share * place.world_size


def batch_for(rates: Sequence[float], step_s: float, equal_s: float) -> int:
    """Return the global batch whose balanced step takes about ``step_s``.

    It is smaller if a step of the equal split would take longer than ``equal_s``.

    Args:
        rates: Samples per second of each worker.
        step_s: Wanted time of a balanced step.
        equal_s: Longest time of a step of the equal split.
    """
    workers = len(rates)
    share = min(step_s * sum(rates) / workers, equal_s * min(rates))
    return workers * max(_FEWEST, round(share))


def calibration_sizes(rate: float, rates: Sequence[float], batch: int) -> list[int]:
    """Return three sizes for calibrating a worker: two near its share, and the equal share."""
    share, equal = batch * rate / sum(rates), batch / len(rates)
    return [max(1, round(size)) for size in (0.6 * share, share, equal)]


def fixed_splits(best: Shares, adaptive: Shares) -> list[Shares]:
    """Return the distinct fixed splits to run: the calibrated best, adaptive's, two neighbours.

    In a neighbour, all workers but the one with the largest share have a tenth more or fewer
    samples, at least one.

    >>> fixed_splits((90, 20, 10), (90, 20, 10))
    [(90, 20, 10), (87, 22, 11), (93, 18, 9)]
    """
    splits, longest = [best, adaptive], best.index(max(best))
    for way in (1, -1):
        moved = [max(1, share + way * max(1, share // 10)) for share in best]
        moved[longest] = sum(best) - (sum(moved) - moved[longest])
        splits.append(tuple(moved))
    return [split for split in dict.fromkeys(splits) if min(split) > 0]


def described(place: BenchRank, batch: int) -> Found:
    """Return devices, backend and global batch of a part."""
    return {
        "devices": [device.name for device in place.devices],
        "kinds": [device.kind for device in place.devices],
        "backend": place.backend,
        "global_batch": batch,
    }
