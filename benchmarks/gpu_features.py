"""What scripts use in addition to the plain loop, on one card: part ``features`` of `gpu.py`.

Each function tries one of these and returns JSON types, with what was seen and what is expected.
`gpu_verdicts.py` compares the two, without a device.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu_peers import IDLE, Loop, Stage, Trial, as_it_is, normed
from benchmarks.gpu_ranks import read_times_s
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import evenstride
from evenstride.trace.read import TRACE_NAME

Found = dict[str, Any]

_BATCH = 64
_RAGGED = 24  # samples of the last batch of an epoch
_FULL = 3  # full batches of an epoch before it
_EPOCHS = 4


def features(rank: int, trial: Trial) -> Found:
    """Return what each feature did; one that raises has ``failed``, and the others still run."""
    if trial.devices[rank] == IDLE:
        return {}
    stage, found = Stage(trial.devices[rank], trial.cores), dict[str, Found]()
    for name, feature in FEATURES.items():
        started_s = time.monotonic()
        try:
            found[name] = feature(stage, trial)
        except Exception:  # the others say as much without it
            found[name] = {"failed": traceback.format_exc()}
            stage.card.limit_memory(None)
        found[name]["took_s"] = time.monotonic() - started_s
    return {**stage.place(_BATCH), "features": found}


def first_steps_at_a_size(stage: Stage, trial: Trial, *, compiled: bool = False) -> Found:
    """Return which steps of four epochs are modelled, and the times of those of the last batch."""
    length = _FULL * _BATCH + _RAGGED
    how = "ddp compiled" if compiled else "ddp"
    with tempfile.TemporaryDirectory(prefix="evenstride-gpu-") as folder:
        trace = Path(folder) / TRACE_NAME
        stride = _stride(stage, _BATCH, trace)
        data = stage.rows("ddp", trial.width, _BATCH, length)
        loop = Loop(stage.model(how, trial.width), data, _BATCH, stride)
        ends = [stage.card.event()]
        for _ in range(_EPOCHS * (_FULL + 1)):
            loop.step()
            ends.append(stage.card.event())
        stage.card.synchronize()
        loop.close()
        modelled = sorted(read_times_s(trace))
    times_ms = [a.elapsed_time(b) for a, b in pairwise(ends)]
    return {
        "last_steps": list(range(_FULL, _EPOCHS * (_FULL + 1), _FULL + 1)),
        "modelled": modelled,
        "last_ms": times_ms[_FULL :: _FULL + 1],
        "full_ms": times_ms[-2],
        "first_ms": times_ms[0],
    }


def compiled_first_steps(stage: Stage, trial: Trial) -> Found:
    """Return the same of a compiled model, which is compiled again for another size."""
    return first_steps_at_a_size(stage, trial, compiled=True)


class Slices(Dataset[Tensor]):
    """Rows on a device in order. A batch is a view."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Tensor:
        return self._x[index]

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        return self._x[indices[0] : indices[-1] + 1]


def out_of_memory(stage: Stage, trial: Trial) -> Found:
    """Return the batches of a step that does not fit at once, and the error of its gradient."""
    card, large = stage.card, trial.width >= 32
    width, batch = (256, 32_768) if large else (16, 2_048)
    torch.manual_seed(3)
    # So deep that the forward pass needs the memory. A backward pass that sends cannot be repeated.
    net = nn.Sequential(*[layer for _ in range(12) for layer in (_square(width), nn.Tanh())])
    net.to(card.device)
    x = torch.randn(batch, width, dtype=torch.float64).to(card.device)
    card.forget_peak()
    before = card.allocated_bytes()
    loss = net(x).square().mean()
    needed = card.allocated_bytes(peak=True) - before
    loss.backward()
    whole = _flat(net)
    net.zero_grad()
    del loss
    stride = _stride(stage, batch)
    loader = stride.loader(Slices(x), shuffle=False, seeded=False, collate_fn=as_it_is)
    model = stride.watch(DistributedDataParallel(net, process_group=stage.alone))
    card.forget_peak()
    card.limit_memory(card.allocated_bytes() + round(0.75 * needed))
    sizes = []
    for rows in loader:
        with stride.guard(), stride.accumulate(model):
            stride.scale(model(rows).square().mean()).backward()  # type: ignore[no-untyped-call]
        sizes.append(stride.samples)
    card.limit_memory(None)
    stride.close()
    error = float((_flat(net) - whole).norm() / whole.norm())
    return {"batch": batch, "sizes": sizes, "needed_bytes": needed, "error": error}


def checkpoints(stage: Stage, trial: Trial) -> Found:
    """Return how far weights and next losses are from those of the run that was saved."""
    with tempfile.TemporaryDirectory(prefix="evenstride-gpu-") as folder:
        first = _Saved(stage, trial, folder)
        for _ in range(3):
            first.loop.step()
        started_s = time.perf_counter()
        first.checkpoint.save()
        blocked_s = time.perf_counter() - started_s
        first.checkpoint.wait()
        at, weights = first.stride.step, _state(first.loop.model)
        first.loop.step()
        after = _state(first.loop.model)
        first.close()

        second = _Saved(stage, trial, folder, seed=4)
        fresh = _state(second.loop.model)
        started_s = time.perf_counter()
        second.checkpoint.restore()
        restored_s = time.perf_counter() - started_s
        figures = {
            "saved_at": at,
            "restored_at": second.stride.step,
            "fresh_differs": _difference(fresh, weights),
            "weights_differ": _difference(_state(second.loop.model), weights),
        }
        second.loop.step()
        figures["next_differs"] = _difference(_state(second.loop.model), after)
        second.close()
    return {**figures, "blocked_s": blocked_s, "restored_s": restored_s}


class _Saved:
    def __init__(self, stage: Stage, trial: Trial, folder: str, seed: int = 3) -> None:
        self.stride = _stride(stage, _BATCH)
        torch.manual_seed(seed)
        net = normed(trial.width).to(stage.card.device)
        model = DistributedDataParallel(net, process_group=stage.alone)
        data = stage.rows("ddp", trial.width, _BATCH, 64 * _BATCH)
        self.loop = Loop(model, data, _BATCH, self.stride)
        self.checkpoint = evenstride.Checkpointer(
            folder,
            self.stride,
            model=model,
            optimizer=self.loop.optimizer,
            every=10**6,
            notices="off",
        )

    def close(self) -> None:
        self.checkpoint.close()
        self.loop.close()


def mean_over_ranks(stage: Stage, trial: Trial) -> Found:
    """Return a mean of numbers on the device, and what it should be."""
    del trial
    stride = _stride(stage, _BATCH)
    total = torch.tensor([3.0, 5.0]).to(stage.card.device)
    both = stride.mean(total, torch.tensor(2).to(stage.card.device))
    one = stride.mean(total.sum(), 4)
    stride.close()
    assert isinstance(both, Tensor), "of two elements"
    return {"means": [*both.tolist(), float(one)], "expected": [1.5, 2.5, 2.0]}


def mixed_precision(stage: Stage, trial: Trial) -> Found:
    """Return the gradients' difference from a loop without evenstride, and a step left out.

    The loss is computed under bfloat16 autocast and scaled by a `torch.amp.GradScaler`. The loss of
    the last step is infinite, so the scaler skips it.
    """
    losses: dict[bool, list[float]] = {}
    seen: dict[bool, dict[str, Tensor]] = {}
    committed = 0
    for plain in (True, False):
        stride = None if plain else _stride(stage, _BATCH)
        data = stage.rows("ddp", trial.width, _BATCH, 64 * _BATCH)
        loop = Loop(stage.model("ddp", trial.width), data, _BATCH, stride)
        scaler = torch.amp.GradScaler(stage.card.device.type, init_scale=256.0)
        losses[plain] = []
        for step in range(6):
            x, y = loop.batch()
            with stage.card.autocast():
                loss = F.cross_entropy(loop.model(x), y)
            loss = loss * float("inf") if step == 5 else loss
            losses[plain].append(loss.item())
            scaler.scale(loop.scaled(loss)).backward()  # type: ignore[no-untyped-call]
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
        seen[plain] = {name: p.detach().cpu() for name, p in loop.model.named_parameters()}
        if stride is not None:
            committed = stride.step
        loop.close()
    return {
        "weights_differ": _difference(seen[True], seen[False]),
        "losses": losses[False],
        "committed": committed,
        "scale": scaler.get_scale(),
    }


def graph_of_the_network(stage: Stage, trial: Trial) -> Found:
    """Return the weights' difference of a network that runs as a graph, and the modelled steps."""
    del trial
    weights: list[dict[str, Tensor]] = []
    modelled: list[int] = []
    for graphed in (False, True):
        with tempfile.TemporaryDirectory(prefix="evenstride-gpu-") as folder:
            trace = Path(folder) / TRACE_NAME
            stride = _stride(stage, _BATCH, trace)
            data = stage.rows("fsdp", 64, _BATCH, 64 * _BATCH)
            net = stage.net("fsdp", 64)
            if graphed:  # before DDP, as torch's documentation asks
                net = stage.card.graphed(net, data.__getitems__(range(_BATCH))[0].clone())
            model = DistributedDataParallel(net, process_group=stage.alone)
            loop = Loop(model, data, _BATCH, stride)
            for _ in range(8):
                loop.step()
            weights.append(_state(loop.model))
            loop.close()
            modelled = sorted(read_times_s(trace))
    return {"weights_differ": _difference(*weights), "modelled": modelled}


def graph_of_a_step(stage: Stage, trial: Trial) -> Found:
    """Return the error of `Stride.scale` while the step is captured."""
    stride = _stride(stage, _BATCH)
    data = stage.rows("ddp", trial.width, _BATCH, 64 * _BATCH)
    loop = Loop(stage.model("ddp", trial.width), data, _BATCH, stride)
    loop.step()
    x, y = loop.batch()
    loss = F.cross_entropy(loop.model(x), y)
    stage.card.synchronize()
    error = ""
    with stage.card.capturing():
        try:
            loop.scaled(loss)
        except evenstride.UsageError as refusal:
            error = str(refusal)
    loop.close()
    return {"error": error}


FEATURES: dict[str, Callable[[Stage, Trial], Found]] = {
    "sizes": first_steps_at_a_size,
    "sizes compiled": compiled_first_steps,
    "memory": out_of_memory,
    "checkpoint": checkpoints,
    "mean": mean_over_ranks,
    "precision": mixed_precision,
    "graph": graph_of_the_network,
    "whole graph": graph_of_a_step,
}


def _stride(stage: Stage, batch: int, trace: Path | None = None) -> evenstride.Stride:
    return evenstride.Stride(batch, policy="uniform", process_group=stage.alone, trace=trace)


def _square(width: int) -> nn.Module:
    return nn.Linear(width, width, dtype=torch.float64)


def _flat(net: nn.Module) -> Tensor:
    gradients: Sequence[Any] = [parameter.grad for parameter in net.parameters()]
    return torch.cat([gradient.flatten().cpu() for gradient in gradients])


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def _difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest absolute difference of two states."""
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
