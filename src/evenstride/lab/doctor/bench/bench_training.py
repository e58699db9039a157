"""Small training runs for a bench: a net that is much to compute and little to exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from evenstride.lab.doctor.bench.bench_ranks import BenchBudget, BenchRank
from evenstride.runtime.stride import Stride

_INPUTS, _CLASSES, _DEPTH = 32, 8, 8
# Cards need more work per sample, or loading the samples would take longer than computing them.
_WIDTHS = {"cpu": 192, "cuda": 2048}
_STEPS = 32  # of an epoch
_FEWEST, _MOST = 8, 8_192  # samples per rank and step
_TRIES = 3


class BenchNet(nn.Module):
    """A residual layer, applied again and again."""

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
    """Random rows on the device for an epoch, fetched a batch at a time.

    Args:
        batch: global batch to train them with.
        device: to keep them on.
        steps: of an epoch.
    """

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

    Torch's own sampler makes a list of all indices at the start of an epoch, which for small
    samples in large batches would take longer than some steps.

    Args:
        length: samples of an epoch, a multiple of the global batch.
        batch: global batch, a multiple of the number of ranks.
        place: of this rank.
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
    """A way of training, kept between blocks; all ranks make the same arms in the same order.

    Args:
        place: of this rank.
        data: such as `RandomRows`; ``batch`` is the global batch, a multiple of the world size.
        policy: of the `Stride` that splits it; ``None`` for plain PyTorch.
        trace: where the leader records it.
        net: to train; the small one of this module if ``None``.
        drift_check: see `Stride.watch`.
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
        """Train some steps, all ranks starting together; return the mean time of one."""
        started_s = self.place.start_s()
        for _ in range(steps):
            self.step()
        return (self.place.now_s() - started_s) / steps

    def step(self) -> None:
        self.backward()
        self.update()

    def timed_steps(self, steps: int) -> list[tuple[float, float]]:
        """Train some steps; return the seconds of own work in each, and of the whole of it.

        Own work is all but the time from this rank's last gradient to the end of the backward
        pass, in which it waits for the others. It is timed by hooks on the parameters and a host
        that waits for the device, which is slow and certain.
        """
        ready_s = [0.0]

        def mark(_: Tensor) -> None:
            # Not for the whole device: what averages the gradients is at work there as well.
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
        """Return evenstride's own time so far on this rank, and the steps it is over."""
        assert self.stride is not None, "only an arm with a policy has time of its own"
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
        """Fetch, forward and backward pass of a step."""
        x, y = next(self._batches)
        loss = F.cross_entropy(self._model(x), y)
        self._scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def choose_batch(place: BenchRank, plan: BenchBudget) -> int:
    """Return the global batch whose equal split takes the mean rank about a step's time.

    Collective; every rank measures how fast it is while all others do the same.
    """
    rates = place.gathered(_samples_per_s(place, plan.step_s))
    mean = sum(rates) / len(rates) * plan.step_s
    share = place.agreed(min(max(round(mean), _FEWEST), _MOST))
    return share * place.world_size


def _samples_per_s(place: BenchRank, step_s: float) -> float:
    """Return this rank's speed at a batch that takes it a good part of a step's time."""
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
    """Return the net, the same on every rank: small as soon as one of them is a processor."""
    kinds = {device.kind for device in place.devices}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BenchNet(_WIDTHS["cpu" if "cpu" in kinds else "cuda"])


def _as_it_is(batch: Any) -> Any:
    return batch


def in_turns(place: BenchRank, seconds: float, arms: int) -> Iterator[tuple[int, ...]]:
    """Yield the arms' numbers in all orders in turn, until the time is over; collective.

    At least three rounds, so that there is a median.
    """
    orders = list(permutations(range(arms)))
    started_s, rounds = place.start_s(), 0
    while rounds < 3 or place.agreed(place.now_s() - started_s < seconds):
        yield orders[rounds % len(orders)]
        rounds += 1
