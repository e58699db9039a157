"""Training on one card with emulated slow peers: parts ``waits`` and ``price`` of `gpu.py`.

NCCL allows one rank per card. So one process trains, and its collectives take as long as if a peer
were late: they keep a stream of their own busy for a time that is set before each step. DDP gets
that from a communication hook, which then averages over a group of this rank alone. FSDP2 gets it
from custom collectives for a group of two ranks. The second rank does nothing but exist, and the
custom collectives copy this rank's part in place of the other's.

Each function returns JSON types. `gpu_verdicts.py` judges them, without a device.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.gpu_card import Card, card_of
from benchmarks.gpu_ranks import read_times_s
from benchmarks.gpu_training import bind
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import evenstride
from evenstride.runtime.launching.die_with_parent import die_with_parent
from evenstride.trace.read import TRACE_NAME

Found = dict[str, Any]

IDLE = "idle"  # the device of a rank that does nothing
PEERS = 2  # ranks of FSDP2's group
_SETTLING_STEPS = 2  # at the start of a block, after the host waited for the device
_EPOCH_STEPS = 64
_MOST_SAMPLES = 2**17


@dataclass(frozen=True, slots=True)
class Trial:
    """One launch on one card.

    Args:
        devices: The card, and `IDLE`.
        cores: Cores of the process.
        how: What to train: ``ddp``, ``fsdp``, ``ddp compiled`` or ``fsdp compiled``.
        width: Width of the network's layers.
        step_ms: Wanted time of a step without waits, in part ``waits``.
        delay_ms: Time that a delayed collective takes.
        steps: Steps of a block.
        rounds: Pairs of blocks.
        seconds: Time that the launch may take, apart from its start.
    """

    devices: tuple[str, ...]
    cores: tuple[int, ...]
    how: str
    width: int
    step_ms: float = 20.0
    delay_ms: float = 20.0
    steps: int = 10
    rounds: int = 12
    seconds: float = 10.0


def trials(part: str, device: str, cores: Sequence[int], *, quick: bool) -> dict[str, Trial]:
    """Return the launches of a part, by name.

    Args:
        part: ``waits``, ``price`` or ``features``.
        device: The card.
        cores: Numbers of the cores to use.
        quick: Whether to use small networks and few steps.
    """

    def trial(how: str, seconds: float, width: int, delay_ms: float = 0.0) -> Trial:
        sizes: dict[str, Any] = {"steps": 6, "rounds": 3, "step_ms": 5.0} if quick else {}
        return Trial(
            (device, IDLE), tuple(cores), how, width, delay_ms=delay_ms, seconds=seconds, **sizes
        )

    if part == "features":
        return {part: trial("ddp", 60.0, 8 if quick else 64)}
    if part == "price":
        return {f"{part} {how}": trial(how, 30.0, 16) for how in ("ddp", "fsdp")}
    # Each of FSDP2's collectives is late, and DDP's last.
    ways = {"ddp": (64, 20.0), "fsdp": (1024, 4.0)}
    return {
        f"{part} {how}{suffix}": trial(how + suffix, seconds, 8 if quick else width, delay_ms)
        for suffix, seconds in (("", 15.0), (" compiled", 45.0))
        for how, (width, delay_ms) in ways.items()
    }


class SlowPeer:
    """Makes collectives take some time on a stream of their own.

    Args:
        card: The card.
    """

    def __init__(self, card: Card) -> None:
        self._card, self._side = card, card.stream()
        self.delay_ms = 0.0
        """How long each collective takes."""
        self._held: list[tuple[torch.Event, torch.Event]] = []

    def hold(self) -> None:
        """Keep the current stream busy for the delay."""
        if self.delay_ms:
            begin = self._card.event()
            self._card.hold(self.delay_ms)
            self._held.append((begin, self._card.event()))

    def held_ms(self) -> list[float]:
        """Return how long each delay since the last call took. The device must have passed them."""
        held, self._held = self._held, []
        return [begin.elapsed_time(end) for begin, end in held]

    def slow_down(self, model: DistributedDataParallel) -> None:
        """Let a model's last bucket arrive late."""
        group = model.process_group

        # Without annotations, which torch compares with types that do not exist at run time.
        def average(_, bucket):  # type: ignore[no-untyped-def]
            self._side.wait_stream(torch.accelerator.current_stream(self._card.device))
            with self._card.on(self._side):
                if bucket.is_last():
                    self.hold()
                # The engine's own stream waits for this one, and DDP for the engine.
                work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
                return work.get_future().then(lambda done: done.value()[0])

        model.register_comm_hook(None, average)

    def slow_down_all(self, model: nn.Module) -> None:
        """Let all gathers and scatters of an FSDP2 model arrive late."""
        for part in fsdp_modules(model):
            part.set_custom_all_gather(Gather(self))
            part.set_custom_reduce_scatter(Scatter(self))
            # The only rank that trains computes the gradient of the whole batch.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


class Gather:
    """An all-gather that repeats this rank's part. FSDP2 calls it on a stream of its own."""

    def __init__(self, peer: SlowPeer) -> None:
        self._peer = peer

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Tensor:
        """Return a new buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        """Fill the output, then hold the stream."""
        del async_op
        copies = output_tensor.view(group.size(), -1)
        copies.copy_(input_tensor.reshape(1, -1).expand_as(copies))
        self._peer.hold()


class Scatter(Gather):
    """A reduce-scatter that returns this rank's part of its own gradient."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill the output, then hold the stream."""
        del group, op, async_op
        output_tensor.copy_(input_tensor[: output_tensor.numel()])
        self._peer.hold()


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 gathers by themselves; a root without parameters is none."""
    parts: list[Any] = [part for part in model.modules() if hasattr(part, "unshard")]
    return [part for part in parts if part._get_fsdp_state()._fsdp_param_groups]


def normed(width: int) -> nn.Module:
    """Return convolutions with batch norm, whose buffers DDP broadcasts in each step."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, width), (width, width), (width, width)):
        layers += [nn.Conv2d(inputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class TanhLayer(nn.Module):
    """A linear layer and an activation, as a block that scripts compile and shard."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        y: Tensor = self.linear(x).tanh()
        return y


def blocks(width: int, count: int) -> nn.Sequential:
    """Return some blocks and a last layer."""
    return nn.Sequential(*[TanhLayer(width) for _ in range(count)], nn.Linear(width, 10))


class Views(Dataset[Any]):
    """Rows on a device. A batch is a view of the first ones, so loading it costs nothing.

    Args:
        x: As many rows as the largest batch has.
        y: Their classes.
        length: Number of samples of an epoch.
    """

    def __init__(self, x: Tensor, y: Tensor, length: int) -> None:
        self._x, self._y, self._length = x, y, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        del index
        return self._x[0], self._y[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self._x[: len(indices)], self._y[: len(indices)]


def as_it_is(batch: Any) -> Any:
    """Return a batch that is one already."""
    return batch


class Loop:
    """A training loop on one card.

    Args:
        model: The model, in DDP or sharded.
        data: The samples.
        batch: Samples per step.
        stride: The `Stride`; ``None`` for plain PyTorch.
    """

    def __init__(
        self, model: nn.Module, data: Views, batch: int, stride: evenstride.Stride | None
    ) -> None:
        self.stride, self._loader = stride, None
        loader: Any = DataLoader(data, batch, collate_fn=as_it_is)
        if stride is not None:
            loader = stride.loader(data, seeded=False, collate_fn=as_it_is)
            with _of_one_rank():
                model = stride.watch(model)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self._batches = _again_and_again(loader)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Fetch the next batch."""
        x, y = next(self._batches)
        return x, y

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss for the backward pass."""
        return loss if self.stride is None else self.stride.scale(loss)

    def step(self) -> None:
        """Train one step."""
        x, y = self.batch()
        self.scaled(F.cross_entropy(self.model(x), y)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        """Leave the loop and end the `Stride`."""
        self._batches.close()
        if self.stride is not None:
            self.stride.close()


def _of_one_rank() -> AbstractContextManager[Any]:
    """Let `Stride.watch` accept FSDP2's group, of which only this rank trains."""
    return patch("evenstride.runtime.engines.fsdp._members", lambda _: 1)


def _again_and_again(loader: Any) -> Any:
    while True:
        yield from loader


class Stage:
    """The card, its groups and a slow peer, in the process that trains.

    Args:
        device: The card's name.
        cores: Cores of this process.
    """

    def __init__(self, device: str, cores: Sequence[int]) -> None:
        die_with_parent()
        bind(cores)
        forget_compiled()
        self.card = card_of(device)
        self.peer = SlowPeer(self.card)
        mine = dist.new_group([0], backend=self.card.backends, use_local_synchronization=True)
        assert mine is not None, "this rank is in it"
        self.alone: dist.ProcessGroup = mine
        both = dist.group.WORLD
        assert both is not None, "the pool has made it"
        self._mesh = DeviceMesh.from_group(both, self.card.device.type)

    def place(self, batch: int) -> Found:
        """Return what a launch says about where it ran."""
        return {
            "devices": [self.card.name],
            "backend": self.card.backends,
            "global_batch": batch,
        }

    def rows(self, how: str, width: int, samples: int, epoch: int) -> Views:
        """Return random samples for a network."""
        shape = (3, 16, 16) if how.startswith("ddp") else (width,)
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(samples, *shape, generator=generator).to(self.card.device)
        y = torch.randint(10, (samples,), generator=generator).to(self.card.device)
        return Views(x, y, epoch)

    def net(self, how: str, width: int, count: int = 4) -> nn.Module:
        """Return a network on the card, with the same weights in every call."""
        torch.manual_seed(3)
        net = normed(width) if how.startswith("ddp") else blocks(width, count)
        return net.to(self.card.device)

    def model(self, how: str, width: int, count: int = 4) -> nn.Module:
        """Return a network in DDP, or sharded in blocks, whose collectives the peer delays."""
        net, compiled = self.net(how, width, count), how.endswith("compiled")
        if how.startswith("ddp"):
            model = DistributedDataParallel(net, process_group=self.alone)
            self.peer.slow_down(model)
            # Around DDP, whose hooks on forward passes must not be compiled.
            return torch.compile(model, backend=self.card.compiler) if compiled else model  # type: ignore[return-value]
        for name, child in list(net.named_children()):
            block: Any = child
            if compiled:  # inside of FSDP2, whose hooks are not compiled
                block = torch.compile(child, backend=self.card.compiler)
                setattr(net, name, block)
            fully_shard(block, mesh=self._mesh)
        root: Any = fully_shard(net, mesh=self._mesh)
        self.peer.slow_down_all(root)
        sharded: nn.Module = root
        return sharded

    def batch_for(self, how: str, width: int, step_ms: float) -> int:
        """Return a power of two of samples whose plain step takes half of ``step_ms`` or more."""
        net, size = self.net(how, width), 8
        while True:
            (x, y), times_ms = self.rows(how, width, size, size).__getitems__(range(size)), []
            for _ in range(4):
                begin = self.card.event()
                F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
                end = self.card.event()
                self.card.synchronize()
                times_ms.append(begin.elapsed_time(end))
            if min(times_ms) >= step_ms / 2 or size >= _MOST_SAMPLES:
                return size
            size *= 2

    def loop(
        self,
        trial: Trial,
        batch: int,
        *,
        trace: Path | None = None,
        plain: bool = False,
        count: int = 4,
    ) -> Loop:
        """Return a new loop; without evenstride if ``plain``."""
        stride = None
        if not plain:
            stride = evenstride.Stride(
                batch, policy="uniform", process_group=self.alone, trace=trace
            )
        data = self.rows(trial.how, trial.width, batch, _EPOCH_STEPS * batch)
        return Loop(self.model(trial.how, trial.width, count), data, batch, stride)

    def alone_ms(self, trial: Trial, batch: int) -> float:
        """Return the time of a step without engine, peers and evenstride."""
        data = self.rows(trial.how, trial.width, batch, _EPOCH_STEPS * batch)
        loop, ends = Loop(self.net(trial.how, trial.width), data, batch, None), []
        for _ in range(trial.steps + _SETTLING_STEPS):
            loop.step()
            ends.append(self.card.event())
        self.card.synchronize()
        loop.close()
        return median(a.elapsed_time(b) for a, b in pairwise(ends[_SETTLING_STEPS:]))


def waits(rank: int, trial: Trial) -> Found:
    """Return busy and waiting times of blocks of steps, without and with a late peer."""
    if trial.devices[rank] == IDLE:
        return {}
    stage = Stage(trial.devices[rank], trial.cores)
    batch = stage.batch_for(trial.how, trial.width, trial.step_ms)
    with tempfile.TemporaryDirectory(prefix="evenstride-gpu-") as folder:
        trace = Path(folder) / TRACE_NAME
        loop, done = stage.loop(trial, batch, trace=trace), list[Found]()
        for _ in range(2 * trial.steps if trial.rounds > 3 else 3):  # cold
            loop.step()
        for delayed in _in_pairs(trial.rounds):
            stage.peer.delay_ms = trial.delay_ms if delayed else 0.0
            done.append({"delayed": delayed, **_block(stage, loop, trial.steps)})
        loop.close()
        read = read_times_s(trace)
    alone_ms = stage.alone_ms(trial, batch)
    for block in done:
        block["read_ms"] = [
            [1e3 * seconds for seconds in read[step]] for step in block["counted"] if step in read
        ]
    return {
        **stage.place(batch),
        "how": trial.how,
        "delay_ms": trial.delay_ms,
        "alone_ms": alone_ms,
        "blocks": done,
        "frames": compiled_frames(),
    }


def forget_compiled() -> None:
    """Forget what torch has compiled in this process, because it compiles a function only so often.

    Costs nothing if nothing was compiled.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        torch.compiler.reset()
        dynamo.clear_compilation_metrics()


def compiled_frames() -> dict[str, int]:
    """Return how many functions were compiled since `forget_compiled`, and how many of ours."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    metrics = dynamo.get_compilation_metrics() if dynamo is not None else []
    files = [str(one.co_filename) for one in metrics]
    ours = "evenstride/runtime/"
    return {"all": len(files), "of evenstride": sum(ours in name for name in files)}


def _in_pairs(rounds: int) -> Iterator[bool]:
    shuffler = random.Random(0)
    for _ in range(rounds):
        first = shuffler.random() < 0.5
        yield from (first, not first)


def _block(stage: Stage, loop: Loop, steps: int) -> Found:
    """Train a block. Return the steps that count, and what took how long by separate events."""
    card, stride = stage.card, loop.stride
    assert stride is not None, "a loop without evenstride reads nothing"
    first, ends = stride.step, [card.event()]
    for _ in range(steps):
        loop.step()
        ends.append(card.event())
    card.synchronize()
    held_ms = stage.peer.held_ms()
    times_ms = [a.elapsed_time(b) for a, b in pairwise(ends)]
    return {
        "counted": list(range(first + _SETTLING_STEPS, first + steps)),
        "step_ms": median(times_ms[_SETTLING_STEPS:]),
        "held_ms": sum(held_ms) / steps,
        "held_once_ms": median(held_ms) if held_ms else 0.0,
    }


def price(rank: int, trial: Trial) -> Found:
    """Return the time of a step with plain PyTorch, the same again, and evenstride, for some sizes.

    The networks are so small that the host is the slower one. In its first 50 steps evenstride
    marks all of FSDP2's waits, and later only some, so that they cost less.
    """
    if trial.devices[rank] == IDLE:
        return {}
    stage, found = Stage(trial.devices[rank], trial.cores), dict[str, Any]()
    for count in (1,) if trial.how.startswith("ddp") else (2, 8, 32):
        arms = {
            name: stage.loop(trial, 8, plain=name != "evenstride", count=count)
            for name in ("plain", "again", "evenstride")
        }
        for loop in arms.values():
            _step_ms(stage, loop, 4)
        always = _in_turns(stage, arms, 4, min(trial.rounds, 11))
        _step_ms(stage, arms["evenstride"], 8)
        later = _in_turns(stage, arms, 10, trial.rounds)
        ours = arms["evenstride"].stride
        assert ours is not None, "this arm has one"
        summary = ours.summary()
        for loop in arms.values():
            loop.close()
        groups = 0 if trial.how.startswith("ddp") else count + 1
        found[str(groups)] = {"always": always, "later": later, "own_s": summary.overhead_s}
    return {**stage.place(8), "by_groups": found}


def _in_turns(
    stage: Stage, arms: dict[str, Loop], steps: int, rounds: int
) -> dict[str, list[float]]:
    shuffler, names = random.Random(0), list(arms)
    times_ms: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        shuffler.shuffle(names)
        for name in names:
            times_ms[name].append(_step_ms(stage, arms[name], steps))
    return times_ms


def _step_ms(stage: Stage, loop: Loop, steps: int) -> float:
    stage.card.synchronize()
    started_s = time.perf_counter()
    for _ in range(steps):
        loop.step()
    stage.card.synchronize()
    return 1e3 * (time.perf_counter() - started_s) / steps
