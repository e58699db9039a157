"""Training loops that keep a record of what they were given."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import evenstride
from evenstride.runtime.timing.step_timer import StepQueue, StepRecord
from tests.inside import session
from tests.multiproc.training import Augmented, net, rows, weights

BATCH = 24


class KeptSteps(list[StepRecord]):
    """Keeps finished steps, and hands them on to where they went before."""

    def __init__(self, onwards: StepQueue) -> None:
        self._onwards = onwards

    def append(self, record: StepRecord, /) -> None:
        super().append(record)
        self._onwards.append(record)


class PrescribedTimes(list[StepRecord]):
    """Reports the steps of a rank with the times that they are to have, whatever they took.

    Args:
        stride: of the rank.
        sample_s: seconds of each sample.
        step_s: seconds of each step besides.
    """

    def __init__(self, stride: evenstride.Stride, sample_s: float, step_s: float = 0.0) -> None:
        timer = session(stride).state.clock.timer
        self._onwards, self._sample_s, self._step_s = timer.finished, sample_s, step_s
        timer.report_to(self)

    def append(self, record: StepRecord, /) -> None:
        busy_s = self._step_s + self._sample_s * record.share
        self._onwards.append(record._replace(busy_s=busy_s, wait_s=0.0))


def burn(size: int, times: int) -> float:
    """Do real work and return how long it took, in seconds."""
    a = torch.ones(size, size)
    started_s = time.perf_counter()
    for _ in range(times):
        a @ a
    return time.perf_counter() - started_s


def augmented(rank: int, policy: str, epochs: int, workers: int) -> tuple[Any, list[float]]:
    """Return the sample ids of every step on this rank, and the final weights."""
    stride = evenstride.Stride(global_batch=BATCH, policy=policy, seed=5)
    loader = stride.loader(Augmented(100), num_workers=workers)
    module = net()
    model = stride.watch(DistributedDataParallel(module))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    steps: list[list[int]] = []
    for _ in range(stride.epoch, epochs):
        for ids, x, y in loader:
            burn(64, 40 * rank)  # so that an adaptive policy has something to do
            loss = nn.functional.mse_loss(model(x), y)
            stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            steps.append(ids.tolist() if stride.samples else [])
    stride.close()
    return steps, weights(module)


def audited(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Train as ``plan`` says, from a saved state if there is one; return what was delivered.

    The plan's keys: policy, epochs, num_workers, persistent, micro, breaks (steps after which
    the loop is left and entered again), stop (steps after which the run ends), state.
    """
    stride = evenstride.Stride(global_batch=BATCH, policy=plan["policy"])
    if plan.get("state") is not None:
        stride.load_state_dict(plan["state"])
    loader = stride.loader(
        rows(plan.get("length", 100)),
        num_workers=plan["num_workers"],
        persistent_workers=plan.get("persistent", False),
        max_micro_batch=plan.get("micro"),
    )
    module = net()
    model = stride.watch(DistributedDataParallel(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    delivered: list[tuple[int, int, list[int]]] = []
    breaks, done = set(plan.get("breaks", ())), False
    while stride.epoch < plan["epochs"] and not done:
        for ids, x, y in loader:
            burn(64, 30 * rank)
            with stride.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            if stride.samples:
                delivered.append((stride.epoch, stride.step, ids.tolist()))
            if stride.synced:
                optimizer.step()
                optimizer.zero_grad()
                done = stride.step == plan.get("stop")
                if done or stride.step in breaks:
                    break
    state, lengths = stride.state_dict(), len(loader)
    stride.close()
    return {"delivered": delivered, "state": state, "len": lengths}


def timed(rank: int, how: str, milliseconds: list[float]) -> tuple[float, float]:
    """Return the injected work per step in seconds, and the part of it that was read back.

    Every other step carries the work, in its forward pass, and times it alone; the others carry a
    quarter of it, which leaves the processor's caches in the same state. What is read back is the
    step's busy time less what the others take in addition to theirs.
    """
    unit_s = torch.tensor([min(burn(128, 20) / 20 for _ in range(9))])
    dist.all_reduce(unit_s, dist.ReduceOp.MIN)  # so that the ranks' work is in this very ratio
    times = round(milliseconds[rank] * 1e-3 / unit_s.item())
    stride = evenstride.Stride(global_batch=8, policy="uniform")
    records = KeptSteps(session(stride).state.clock.timer.finished)
    injected: dict[int, float] = {}
    session(stride).state.clock.timer.report_to(records)
    torch.manual_seed(0)  # the ranks must have the same data, whatever their processes ran before
    data = TensorDataset(torch.randn(8 * 64, 4))
    parts = 2 if how == "micro-batches" else 1
    weight_fn = _samples if how == "token weights" else None
    loader = stride.loader(data, weight_fn=weight_fn, max_micro_batch=4 // parts)
    model = _wrapped(stride, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (x,) in loader:
        step = stride.step
        with stride.accumulate(model):
            loss = model(x).square().mean()
            spent_s = burn(128, (times if step % 2 else times // 4) // parts)
            injected[step] = injected.get(step, 0.0) + spent_s
            stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        if not stride.synced:
            continue
        optimizer.step()
        optimizer.zero_grad()
        if how == "evaluation and saving" and step % 5 == 4:
            burn(128, 3 * times)
            stride.mean(1.0, 1)
    stride.close()
    return _read_back([r for r in records if r.modelled and r.step > 8], injected)


def gradients_at_commit(rank: int, static_graph: bool) -> list[list[float]]:
    """Return the gradients that this rank has when each step commits."""
    stride = evenstride.Stride(global_batch=8, policy="static:2,6")
    module = net()
    model = stride.watch(DistributedDataParallel(module, static_graph=static_graph))
    loader = stride.loader(rows(24))
    seen: list[list[float]] = []
    commit = session(stride).step.backward._commit

    def committed(draw: Any) -> None:
        seen.append([float(p.grad.sum()) for p in module.parameters() if p.grad is not None])
        commit(draw)

    session(stride).step.backward._commit = committed
    for _, x, y in loader:
        stride.scale(nn.functional.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
    stride.close()
    return seen


def _samples(batch: list[Tensor]) -> float:
    return float(len(batch[0]))


def _read_back(records: list[StepRecord], injected: dict[int, float]) -> tuple[float, float]:
    """Return the injected work per step, and the part of it that the records have."""
    rest_s = quartile([r.busy_s - injected[r.step] for r in records if r.step % 2 == 0])
    worked = [r for r in records if r.step % 2]
    read = quartile([(r.busy_s - rest_s) / injected[r.step] for r in worked])
    return quartile([injected[r.step] for r in worked]), read


def quartile(values: list[float]) -> float:
    """Return the first quartile: what comes out where nothing else disturbs."""
    return sorted(values)[len(values) // 4]


def _wrapped(stride: evenstride.Stride, how: str) -> DistributedDataParallel:
    """Return a watched model of one layer, set up in one of the ways."""
    module = _Checkpointed(how) if "checkpointed" in how else nn.Linear(4, 1)
    unused = nn.Linear(4, 1) if how == "find_unused_parameters" else nn.Identity()
    model = DistributedDataParallel(
        _Two(module, unused),
        static_graph="static_graph" in how,
        find_unused_parameters=how == "find_unused_parameters",
        gradient_as_bucket_view=how == "gradient_as_bucket_view",
    )
    if how == "torch.compile":
        compiled: Any = torch.compile(model, backend="aot_eager")
        stride.watch(compiled)
        assert isinstance(compiled, nn.Module)
        return compiled  # type: ignore[return-value]
    stride.watch(model)
    if how == "a user's hook":
        model.register_comm_hook(None, fp16_compress_hook)
    return model


class _Checkpointed(nn.Module):
    """Two layers, of which some run again in a backward pass of their own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
        self.again = ["first" in how or "both" in how, "last" in how or "both" in how]

    def forward(self, x: Tensor) -> Any:
        """Run the layers."""
        x = x.detach().requires_grad_()
        for layer, again in zip(self.layers, self.again, strict=True):
            x = checkpoint(layer, x, use_reentrant=True) if again else layer(x)
        return x


class _Two(nn.Module):
    """A used and perhaps an unused part, with a buffer that DDP broadcasts."""

    def __init__(self, used: nn.Module, unused: nn.Module) -> None:
        super().__init__()
        self.used, self.unused = used, unused
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        """Use one part."""
        return self.used(x)


def with_environment(rank: int, name: str, value: str, fn: Any, *args: Any) -> Any:
    """Call ``fn`` with a variable set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        return fn(rank, *args)


def in_another_order(rank: int) -> str:
    """Return the messages of ranks that make the same calls in another order."""
    stride = evenstride.Stride(global_batch=8)
    model = DistributedDataParallel(net())
    try:
        if rank:
            stride.loader(rows(16))
        else:
            stride.watch(model)
    except evenstride.ConfigError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        stride.close()
    return ""
