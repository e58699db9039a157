"""A bench of exactness, timing, speed-up and overhead, under one deadline.

It trains small networks with much computation and few gradients.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from evenstride.core.allocation.integer_splits import apportion
from evenstride.lab.doctor.bench_exactness import exactness, wrong
from evenstride.lab.doctor.bench_ranks import BenchBudget, BenchRank, take_place
from evenstride.lab.doctor.checkup import Findings, examine_rank
from evenstride.runtime.stride import Stride
from evenstride.trace.read import TRACE_NAME
from evenstride.trace.run_log import RunLog

_INPUTS, _CLASSES, _DEPTH = 32, 8, 8
# GPUs need more work per sample, or loading would take longer than computing.
_WIDTHS = {"cpu": 192, "cuda": 2048}
_STEPS = 32  # of an epoch
_FEWEST, _MOST = 8, 8_192  # samples per rank and step
_TRIES = 3
_RESAMPLES = 4_000
_UNDER = 0.01  # target of the overhead


def run_bench(
    world_size: int, plan: BenchBudget, tell: Callable[[str], None]
) -> tuple[int, Findings]:
    """Return this process's rank, and the findings of all ranks; collective.

    The findings are JSON types, and the same on all ranks. For a single process, ``timing``,
    ``waiting`` and ``balance`` are ``None``. ``wrong`` has a sentence for each promise that does
    not hold. Raises `ConfigError` on every rank if the installed torch does not support the GPU of
    some rank.
    """
    with _deadline(plan.deadline_s), take_place(world_size, plan) as place:
        return place.rank, _measure(place, plan, tell if place.rank == 0 else lambda _: None)


def _measure(place: BenchRank, plan: BenchBudget, tell: Callable[[str], None]) -> Findings:
    ranks = place.gathered(examine_rank(place.rank))
    tell("exactness: unequal shares against one process, float64 and float32")
    exact = exactness(place, Stride)
    data = RandomRows(choose_batch(place, plan), place.device)
    timed: list[dict[str, Any]] | None = None
    waited: dict[str, Any] | None = None
    balanced: dict[str, Any] | None = None
    if place.world_size > 1:
        tell(f"timing: busy times compared with a reference, about {plan.timing_s:.0f} s")
        timed = timing(place, plan, data)
        tell(f"waiting: rank 0 with and without waits in turns, about {plan.waiting_s:.0f} s")
        waited = waiting(place, plan, data)
        tell(f"balance: equal and adaptive split in turns, about {plan.balance_s:.0f} s")
        balanced = balance(place, plan, data)
    tell(f"overhead: with and without evenstride in turns, about {plan.overhead_s:.0f} s")
    return {
        "ranks": ranks,
        "backend": place.backend,
        "global_batch": data.batch,
        "exactness": exact,
        "timing": timed,
        "waiting": waited,
        "balance": balanced,
        "overhead": overhead(place, plan, data),
        "wrong": wrong(exact),
    }


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """End the process with its stacks on stderr if the block takes too long."""
    stderr = sys.__stderr__
    if stderr is None:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def timing(place: BenchRank, plan: BenchBudget, data: RandomRows) -> list[dict[str, Any]]:
    """Return the busy time of each rank as evenstride measures it, and a reference; collective.

    The shares are unequal, so that ranks wait for each other. The reference is of the same steps,
    timed by other means; see `BenchArm.timed_steps`. All figures are medians over the reported
    steps. Those of evenstride are ``None`` if it reported no step.
    """
    weights = np.array([1.0 + rank % 3 for rank in range(place.world_size)])
    most = np.full_like(weights, data.batch)
    shares = apportion(weights, data.batch, np.ones_like(weights), most)
    policy = "static:" + ",".join(str(int(share)) for share in shares)
    with tempfile.TemporaryDirectory(prefix="evenstride-bench-") as folder:
        trace = Path(folder) / TRACE_NAME if place.rank == 0 else None
        arm = BenchArm(place, data, policy, trace)
        times_s = arm.timed_steps(plan.block_steps)
        for _ in in_turns(place, plan.timing_s, 1):
            times_s += arm.timed_steps(plan.block_steps)
        arm.close()
        all_times_s = place.gathered(times_s)
        figures = (
            [
                {"share": int(share), **compared(mine, read_s, plan.block_steps)}
                for share, mine, read_s in zip(
                    shares, all_times_s, _read_s(trace, place.world_size), strict=True
                )
            ]
            if trace
            else []
        )
    return place.agreed(figures)


def compared(
    times_s: Sequence[tuple[float, float]], read_s: Mapping[int, float], cold_steps: int
) -> dict[str, float | None]:
    """Return the medians of the measured and of the reference times, and of their ratio per step.

    They are over the measured steps. Without any, those of the reference are over all warm steps.
    """
    steps = [step for step in read_s if cold_steps <= step < len(times_s)]
    warm = [times_s[step] for step in steps] or times_s[cold_steps:]
    return {
        "true_s": median(own_s for own_s, _ in warm),
        "step_s": median(whole_s for _, whole_s in warm),
        "read_s": median(read_s[step] for step in steps) if steps else None,
        "ratio": median(read_s[step] / times_s[step][0] for step in steps) if steps else None,
    }


def waiting(place: BenchRank, plan: BenchBudget, data: RandomRows) -> dict[str, Any]:
    """Return rank 0's busy times in balance, and while it waits for the others; collective.

    Its share is the same in both. The others have what takes them as long, or twice as much. While
    it waits on a GPU, the collectives that have begun occupy a part of it. So its work may take
    longer, and evenstride would take it for a slower one. The times are ``None`` if evenstride
    reported no step.
    """
    rates = place.gathered(_samples_per_s(place, plan.step_s))
    share = max(_FEWEST // 2, data.batch // (2 * place.world_size))
    with tempfile.TemporaryDirectory(prefix="evenstride-bench-") as folder:
        arms, traces, steps = list[BenchArm](), list[Path](), plan.block_steps
        for factor in (1, 2):
            others = [max(1, round(factor * share * rate / rates[0])) for rate in rates[1:]]
            policy = "static:" + ",".join(map(str, place.agreed([share, *others])))
            traces.append(Path(folder) / str(factor) / TRACE_NAME)
            trace = traces[-1] if place.rank == 0 else None
            rows = RandomRows(share + sum(place.agreed(others)), place.device)
            arms.append(BenchArm(place, rows, policy, trace))
            arms[-1].block(2 * steps)
        times_s = _blocks(place, plan.waiting_s, arms, steps)
        for arm in arms:
            arm.close()
        figures: dict[str, Any] = {"share": share, "balance_s": None, "waiting_s": None}
        if place.rank == 0:
            read = [_read_s(trace, place.world_size)[0] for trace in traces]
            figures |= while_waiting(read[0], read[1], steps)
    return place.agreed({**figures, "step_s": [median(one) for one in times_s]})


def while_waiting(
    balanced_s: Mapping[int, float], waited_s: Mapping[int, float], steps: int
) -> dict[str, Any]:
    """Return busy times in balance and in waiting, and their ratio, from pairs of blocks.

    Args:
        balanced_s: Busy times by step.
        waited_s: The same in waiting.
        steps: Steps of a block. The first two blocks warm up, and so does each block's first step.
    """
    both = [_in_blocks(one, steps) for one in (balanced_s, waited_s)]
    pairs = [(both[0][block], both[1][block]) for block in both[0] if block in both[1]]
    if not pairs:
        return {}
    ratios = [waits / balanced for balanced, waits in pairs]
    return {
        "balance_s": median(balanced for balanced, _ in pairs),
        "waiting_s": median(waits for _, waits in pairs),
        "ratio": median(ratios),
        "ratio_interval": median_interval(ratios),
    }


def _in_blocks(busy_s: Mapping[int, float], steps: int) -> dict[int, float]:
    blocks: dict[int, list[float]] = {}
    for step, seconds in busy_s.items():
        if step >= 2 * steps and step % steps:
            blocks.setdefault(step // steps, []).append(seconds)
    return {block: median(seconds) for block, seconds in blocks.items()}


def _read_s(trace: Path, workers: int) -> list[dict[int, float]]:
    busy_s: list[dict[int, float]] = [{} for _ in range(workers)]
    for seen in RunLog(trace).observations:
        if seen.modelled:
            busy_s[seen.worker] |= dict(enumerate(seen.busy_s, start=seen.first_step))
    return busy_s


def balance(place: BenchRank, plan: BenchBudget, data: RandomRows) -> dict[str, Any]:
    """Return the step times of the equal and of the adaptive split; collective."""
    arms = [BenchArm(place, data, policy) for policy in ("uniform", "adaptive")]
    for arm in arms:  # the opening
        arm.block(2 * plan.block_steps)
    times_s = _blocks(place, plan.balance_s, arms, plan.block_steps)
    stride = arms[1].stride
    assert stride is not None, "both arms have a policy"
    summary, shares = stride.summary(), list(stride.shares)
    for arm in arms:
        arm.close()
    ratios = [equal / adaptive for equal, adaptive in zip(*times_s, strict=True)]
    figures = {
        "global_batch": data.batch,
        "equal_s": median(times_s[0]),
        "adaptive_s": median(times_s[1]),
        "speedup": median(ratios),
        "speedup_interval": median_interval(ratios),
        "bound_model": summary.bound_model,
        "shares": shares,
        "changes": summary.changes,
        "blocks": len(ratios),
    }
    return place.agreed(figures)


def overhead(place: BenchRank, plan: BenchBudget, data: RandomRows) -> dict[str, Any]:
    """Return the step times of evenstride's equal split and of plain training; collective.

    Plain training runs twice, the second time as a control (A/A). The deviation of its ratio from 1
    is the resolution of the measurement on this machine.
    """
    arms = [BenchArm(place, data, policy) for policy in (None, "uniform", None)]
    for arm in arms:
        arm.block(2 * plan.block_steps)
    own_before_s, steps_before = arms[1].own_s()
    plain_s, with_s, again_s = _blocks(place, plan.overhead_s, arms, plan.block_steps)
    own_after_s, steps_after = arms[1].own_s()
    for arm in arms:
        arm.close()
    ratios = [b / a for a, b in zip(plain_s, with_s, strict=True)]
    controls = [b / a for a, b in zip(plain_s, again_s, strict=True)]
    high = median_interval(ratios)[1]
    figures = {
        "plain_s": median(plain_s),
        "evenstride_s": median(with_s),
        "ratio": median(ratios),
        "ratio_interval": median_interval(ratios),
        "control": median(controls),
        "control_interval": median_interval(controls),
        "pairs": len(ratios),
        "verdict": "met" if high - median(controls) < _UNDER else "unresolved",
    }
    own_s = (own_after_s - own_before_s) / (steps_after - steps_before)
    return {**place.agreed(figures), "own_s": max(place.gathered(own_s))}


def _blocks(
    place: BenchRank, seconds: float, arms: Sequence[BenchArm], steps: int
) -> list[list[float]]:
    times_s: list[list[float]] = [[] for _ in arms]
    for order in in_turns(place, seconds, len(arms)):
        for number in order:
            times_s[number].append(arms[number].block(steps))
    return times_s


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median of many values; deterministic.

    Source:
        The percentile bootstrap (Efron, Annals of Statistics 1979).
    """
    known = np.array(values)
    rng = np.random.default_rng(0)
    medians = np.median(known[rng.integers(0, len(known), (_RESAMPLES, len(known)))], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


class BenchNet(nn.Module):
    """A residual layer that is applied several times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(_INPUTS, width), nn.Linear(width, _CLASSES)
        self.again = nn.Linear(width, width)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits, shape ``(samples, 8)``, of rows of 32 numbers."""
        inner = self.first(rows)
        for _ in range(_DEPTH):
            inner = inner + torch.relu(self.again(inner)) / _DEPTH
        logits: Tensor = self.last(inner)
        return logits


class RandomRows(Dataset[Any]):
    """Random rows on the device for an epoch of some global batches, fetched in batches."""

    def __init__(self, batch: int, device: torch.device, steps: int = _STEPS) -> None:
        generator = torch.Generator().manual_seed(5)
        self.batch = batch
        self._x = torch.randn(steps * batch, _INPUTS, generator=generator).to(device)
        self._y = self._x[:, :_CLASSES].argmax(1)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index], self._y[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices, device=self._x.device)
        return self._x[chosen], self._y[chosen]


class EqualShares(Sampler[list[int]]):
    """The equal split without evenstride: this rank's indices in each global batch.

    Torch's own sampler creates a list of all indices at the start of an epoch. For small samples in
    large batches that would take longer than some steps. The length of the epoch is a multiple of
    the global batch, which is a multiple of the number of ranks.
    """

    def __init__(self, length: int, batch: int, place: BenchRank) -> None:
        self._length, self._batch, self._epoch = length, batch, 0
        self._share = batch // place.world_size
        self._first = place.rank * self._share

    def __len__(self) -> int:
        return self._length // self._batch

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng(self._epoch).permutation(self._length)
        self._epoch += 1
        for start in range(self._first, self._length, self._batch):
            yield order[start : start + self._share].tolist()


class BenchArm:
    """A model with its own training loop; all ranks create the same arms in the same order.

    ``data`` is a data set like `RandomRows`. Its ``batch`` is the global batch, a multiple of the
    world size. Without a policy, the arm trains with plain PyTorch. The leader writes ``trace``.
    The default network is the small one of this module.
    """

    def __init__(
        self,
        place: BenchRank,
        data: Any,
        policy: str | None,
        trace: Path | None = None,
        *,
        net: nn.Module | None = None,
        drift_check: int | None = None,
    ) -> None:
        self.place = place
        self.net = _net(place) if net is None else net
        self._model = place.averaged(self.net)
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.stride: Stride | None = None
        self._scale: Callable[[Tensor], Tensor] = lambda loss: loss
        self._loader: Any
        if policy is None:
            sampler = EqualShares(len(data), data.batch, place)
            self._loader = DataLoader(data, batch_sampler=sampler, collate_fn=_as_it_is)
        else:
            self.stride = Stride(data.batch, policy=policy, process_group=place.group, trace=trace)
            self._loader = self.stride.loader(data, seeded=False, collate_fn=_as_it_is)
            self._model = self.stride.watch(self._model, drift_check=drift_check)
            self._scale = self.stride.scale
        self._batches = self._forever()

    def block(self, steps: int) -> float:
        """Train some steps, which all ranks start together; return the mean step time."""
        started_s = self.place.start_s()
        for _ in range(steps):
            self.step()
        return (self.place.now_s() - started_s) / steps

    def step(self) -> None:
        self.backward()
        self.update()

    def timed_steps(self, steps: int) -> list[tuple[float, float]]:
        """Train some steps; return the busy time and the step time of each.

        The busy time leaves out the time from this rank's last gradient to the end of the backward
        pass, in which it waits for the others. Hooks on the parameters measure it, and the host
        waits for the device. This is slow, but accurate.
        """
        ready_s = [0.0]

        def mark(_: Tensor) -> None:
            # Wait for the stream only: the all-reduce also runs on the device.
            ready_s[0] = self.place.computed_s()

        hooks = [
            parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
            for parameter in self.net.parameters()
        ]
        times_s, before_s = list[tuple[float, float]](), self.place.start_s()
        for _ in range(steps):
            self.backward()
            backward_s = self.place.now_s()
            self.update()
            now_s = self.place.now_s()
            times_s.append((now_s - before_s - (backward_s - ready_s[0]), now_s - before_s))
            before_s = now_s
        for hook in hooks:
            hook.remove()
        return times_s

    def own_s(self) -> tuple[float, int]:
        """Return evenstride's own time so far on this rank, and the number of steps."""
        assert self.stride is not None, "an arm without a policy has no Stride"
        summary = self.stride.summary()
        return summary.overhead_s * summary.step, summary.step

    def close(self) -> None:
        """Leave the loop and end the `Stride`."""
        self._batches.close()
        if self.stride is not None:
            self.stride.close()

    def _forever(self) -> Any:
        while True:
            yield from self._loader

    def backward(self) -> None:
        """Run the fetch, the forward pass and the backward pass of a step."""
        x, y = next(self._batches)
        loss = F.cross_entropy(self._model(x), y)
        self._scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def choose_batch(place: BenchRank, plan: BenchBudget) -> int:
    """Return a global batch for which a rank of mean speed takes about the target step time.

    Collective: all ranks measure their speeds at the same time.
    """
    rates = place.gathered(_samples_per_s(place, plan.step_s))
    mean = sum(rates) / len(rates) * plan.step_s
    share = place.agreed(min(max(round(mean), _FEWEST), _MOST))
    return share * place.world_size


def _samples_per_s(place: BenchRank, step_s: float) -> float:
    """Return this rank's speed at a batch that takes a third of the target step time or more."""
    net, size = _net(place).to(place.device), _FEWEST
    place.start_s()
    while True:
        data = RandomRows(size, place.device, steps=1)
        x, y = data.__getitems__(range(size))
        times_s = list[float]()
        for _ in range(_TRIES):
            started_s = place.now_s()
            F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
            times_s.append(place.now_s() - started_s)
        if min(times_s) >= step_s / 3 or 2 * size > _MOST:
            return size / min(times_s)
        size *= 2


def _net(place: BenchRank) -> BenchNet:
    """Return the network, the same on every rank: the small one if any rank is a processor."""
    kinds = {device.kind for device in place.devices}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BenchNet(_WIDTHS["cpu" if "cpu" in kinds else "cuda"])


def _as_it_is(batch: Any) -> Any:
    return batch


def in_turns(place: BenchRank, seconds: float, arms: int) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of the arms, in all orders in turn, until the time is over; collective.

    There are at least three rounds.
    """
    orders = list(permutations(range(arms)))
    started_s, rounds = place.start_s(), 0
    while rounds < 3 or place.agreed(place.now_s() - started_s < seconds):
        yield orders[rounds % len(orders)]
        rounds += 1
