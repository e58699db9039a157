"""Requests that cannot be served; each returns what was raised on this rank."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.training import net, rows

CPU = torch.device("cpu")
# Programs whose `Stride` has all ranks, not those of one dimension.
_OVER_ALL = (
    "tp over all",
    "cp flat",
    "cp context",
    "ep ignored",
    "ep of one rank",
    "pp later",
    "pp parts",
    "pp over all",
    "HSDP",
)
USUAL_BACKENDS = "cpu:gloo,cuda:nccl"


class Endless(torch.utils.data.Dataset[Any]):
    """A data set that does not know how long it is."""

    def __getitem__(self, index: int) -> int:
        return index


def raised(ask: Callable[[], object]) -> tuple[str, str]:
    """Return type and text of what ``ask`` raises."""
    try:
        ask()
    except evenstride.EvenstrideError as error:
        return type(error).__name__, str(error)
    return "", ""


def settings(rank: int, by_rank: list[dict[str, Any]]) -> tuple[str, str]:
    """Make a Stride with this rank's settings."""
    strides: list[evenstride.Stride] = []
    answer = raised(lambda: strides.append(evenstride.Stride(**by_rank[rank])))
    for stride in strides:
        stride.close()
    return answer


def loaders(rank: int, name: str) -> tuple[str, str]:
    """Ask for a loader that cannot be."""
    stride = evenstride.Stride(global_batch=8)
    requests: dict[str, Callable[[], object]] = {
        "another length": lambda: stride.loader(rows(20 + rank)),
        "no length": lambda: stride.loader(Endless()),
        "empty on one rank": lambda: stride.loader(rows(20 * rank)),
        "batch_size": lambda: stride.loader(rows(20), batch_size=4),  # type: ignore[call-arg]
        "shuffle": lambda: stride.loader(rows(20), shuffle=rank == 0),
        "drop_last": lambda: stride.loader(rows(7), drop_last=True),
        "twice": lambda: [stride.loader(rows(20)) for _ in range(2)] and None,
        "evaluation batch": lambda: stride.loader(rows(20), global_batch=4),
        "other evaluation sets": lambda: stride.loader(rows(20 + rank), train=False),
    }
    kept = stride.loader(rows(20)) if name == "twice" else None
    answer = raised(requests[name])
    del kept
    stride.close()
    return answer


def loops(rank: int, name: str) -> tuple[str, str]:
    """Break the contract of the training loop, on every rank alike."""
    stride = evenstride.Stride(global_batch=8, policy="uniform")
    micro = 2 if name == "micro-batches without accumulate" else None
    loader = stride.loader(rows(40), max_micro_batch=micro)
    model = stride.watch(DistributedDataParallel(net()))

    def loss(batch: Any) -> torch.Tensor:
        value: torch.Tensor = nn.functional.mse_loss(model(batch[1]), batch[2])
        return value

    def step(batch: Any) -> None:
        stride.scale(loss(batch)).backward()  # type: ignore[no-untyped-call]

    def leave_state(batch: Any) -> None:
        step(batch)
        stride.state_dict()

    breaches: dict[str, Callable[[Any], object]] = {
        "not scaled": lambda batch: loss(batch).backward(),  # type: ignore[no-untyped-call]
        "no backward": lambda batch: stride.scale(loss(batch)),
        "scaled twice": lambda batch: stride.scale(stride.scale(loss(batch))),
        "two loops": lambda _: next(iter(loader)),
        "micro-batches without accumulate": lambda batch: stride.scale(loss(batch)),
        "state in mid-step": leave_state,
        "a negative weight": lambda batch: stride.scale(loss(batch), weight=-1.0),
        "restart inside": lambda _: loader.restart(),  # type: ignore[attr-defined]
        "load inside": lambda _: stride.load_state_dict(stride.state_dict()),
    }

    def run() -> None:
        for batch in loader:
            breaches[name](batch)

    answer = raised(run)
    stride.close()
    return answer


def missing(rank: int) -> tuple[str, str]:
    """Rank 1 never makes its Stride."""
    if rank == 1:
        return "", ""
    return raised(lambda: evenstride.Stride(global_batch=8))


def watched(rank: int, name: str) -> tuple[str, str]:
    """Watch a model that cannot be watched, on rank 1 alone or on both."""
    stride = evenstride.Stride(global_batch=8, engine="none")
    module = net()
    if name == "an accelerator of another kind on one rank" and rank == 1:
        module = nn.Linear(2, 1, device="meta")
    answer = raised(lambda: stride.watch(module))
    stride.close()
    return answer


def divided(rank: int, names: list[str]) -> dict[str, tuple[str, str]]:
    """Train models on two by two ranks that are divided along a second dimension."""
    answers = {}
    for name in names:
        answers[name] = _divided(rank, name)
        gc.collect()  # no mesh and no pipeline is left for the next one
    return answers


def _divided(rank: int, name: str) -> tuple[str, str]:
    names = ("replicate", "shard") if name == "HSDP" else ("dp", name.partition(" ")[0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    own = None if name in _OVER_ALL else mesh["dp"].get_group()
    model = _built(rank, name, mesh)
    stride = evenstride.Stride(
        global_batch=8,
        process_group=own,
        shard_group=mesh["shard"].get_group() if name == "HSDP" else None,
        engine="none" if name == "pp parts" else "auto",
    )
    answer = raised(lambda: _train(stride, rank, name, model, mesh))
    stride.close()
    return answer


def _train(stride: evenstride.Stride, rank: int, name: str, model: Any, mesh: Any) -> None:
    stages: list[Any] = []
    if name == "pp stage":
        stages.append(_stage(model, rank, mesh["pp"].get_group()))
    stride.watch(model)
    if name == "pp later":
        stages.append(_stage(model, rank, mesh["pp"].get_group()))
    for _, x, _ in stride.loader(rows(16, torch.float32)):
        whole = torch.ones(len(x), 16, 5)
        with _inside(mesh["cp"], whole) if name == "cp context" else contextlib.nullcontext():
            stride.scale(model(whole).square().mean()).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()


def _built(rank: int, name: str, mesh: Any) -> Any:
    model: Any = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 4))
    if name.startswith("tp"):
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    if name in ("tp", "tp over all"):
        return model
    if name in ("pp parts", "pp over all"):
        model = model[rank % 2]
    match name:
        case "pp parts":
            return model
        case "tp fsdp" | "cp slice":
            return fully_shard(model, mesh=mesh["dp"])
        case "cp flat":
            return fully_shard(model, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
        case "HSDP":
            return fully_shard(model, mesh=mesh)
        case "tp ddp" | "cp ddp":
            return DistributedDataParallel(model, device_mesh=mesh["dp"])
    return _averaged(rank, name, model, mesh)


def _averaged(rank: int, name: str, model: Any, mesh: Any) -> nn.Module:
    if name == "ep ignored":
        ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, ["1.weight", "1.bias"])
    if name == "ep of one rank" and rank == 1:
        model[1].weight.allreduce = False
    some = name in ("cp alone", "pp stage", "pp over all")
    group = mesh["dp"].get_group() if some else None
    return DistributedDataParallel(model, process_group=group)


def _stage(model: nn.Module, rank: int, group: dist.ProcessGroup) -> Any:
    from torch.distributed.pipelining import PipelineStage  # takes seconds

    return PipelineStage(model, rank % 2, 2, CPU, group=group)


def _inside(mesh: Any, whole: torch.Tensor) -> Any:
    from torch.distributed.tensor.experimental import context_parallel

    return context_parallel(mesh, buffers=[whole], buffer_seq_dims=[1])


def warnings_of_the_rest(rank: int, policy: str | None) -> list[str]:
    """Return what this rank warns of when its `Stride` has half of the ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("evenstride")
    logger.addHandler(handler)
    stride = evenstride.Stride(global_batch=8, process_group=mine, policy=policy)
    stride.watch(DistributedDataParallel(net(), process_group=mine))
    stride.close()
    logger.removeHandler(handler)
    return [text for text in records if "of 4 ranks" in text]


def on_a_gpu_host(
    rank: int, chosen: list[bool], found: list[bool] | None = None, backends: str = USUAL_BACKENDS
) -> tuple[str, str]:
    """Make a `Stride` on ranks of which some use their GPU, or have one.

    Without ``backends``, each rank has the backend that torch chooses for its device.
    """
    has = found is None or found[rank]
    config = backends or ("cuda:nccl" if has else "cpu:gloo")
    strides: list[evenstride.Stride] = []
    with pytest.MonkeyPatch.context() as patch:
        found_device = torch.device("cuda") if has else None
        patch.setattr(torch.accelerator, "current_accelerator", lambda: found_device)
        patch.setattr(torch.cuda, "is_available", lambda: has)
        patch.setattr(torch.cuda, "is_initialized", lambda: chosen[rank])
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(dist, "get_backend_config", lambda _: config)
        patch.setattr("evenstride.runtime.failures.peers.fingerprint", lambda *_: "a GPU")
        answer = raised(lambda: strides.append(evenstride.Stride(global_batch=8)))
    for stride in strides:
        stride.close()
    return answer
