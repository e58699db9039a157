"""What the ranks compare about a watched model, and errors for what these ranks cannot do."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstride.errors import ConfigError
from evenstride.runtime import usage_errors
from evenstride.runtime.coordination.agreement import Plain, require_equal
from evenstride.runtime.engines.ddp import check_compression
from evenstride.runtime.engines.device_support import (
    RankDevice,
    backend_of,
    card_of,
    check_backends,
    check_kind,
    read_device,
    require,
)
from evenstride.runtime.engines.divided_models import of_pipeline, pipelined
from evenstride.runtime.engines.fsdp import check_engine, parameter_groups, uncounted
from evenstride.runtime.engines.watched_models import (
    averages,
    engine_of,
    engines_in,
    fsdp_parts,
    is_of_fsdp,
    is_sharded,
)
from evenstride.runtime.usage_errors import check_whole

logger = logging.getLogger("evenstride")

_REMEDIES = {
    "weights": (
        "give every rank a model with the same parameters. Where ranks have different parts of a "
        "model (tensor, expert or pipeline parallelism), evenstride cannot train it"
    )
}

Agree = Callable[[Callable[[], Plain], Callable[[list[Plain]], Plain]], Plain]


def meet(
    model: nn.Module,
    asked: Plain,
    group: dist.ProcessGroup | None,
    agree: Agree,
    connections: int | None = None,
) -> Plain:
    """Return what all ranks agree on about a model; collective, with the same error on all ranks.

    ``asked`` has the arguments of `Stride.watch`. ``connections`` is the number of hardware queues
    of this rank's device if the environment limits them. The result has ``kinds`` (of device, in
    rank order), ``sharing`` (how many ranks compute on each rank's card) and ``not_measured`` (why
    steps cannot be measured; empty if they can).
    """

    # An error in either function reaches all ranks as the same error.
    def show() -> Plain:
        _require_module(model)
        _check_drift(model, asked["drift_check"])
        check_compression(model, asked["compress"])
        device = device_of(model)
        check_kind(device)
        check_engine(model, [device.type] * (1 if group is None else dist.get_world_size(group)))
        return {
            "asked": {**asked, "weights": _outline(model)},
            "device": asdict(read_device(device)),
            # Ranks differ in this if torch chose the backend by the device.
            "backends": "" if group is None else dist.get_backend_config(group),
            "card": card_of(device),
            "bf16": any(p.dtype is torch.bfloat16 for p in model.parameters()),
            "compiled": _by_inductor(model),
            "not_measured": why_not_measured(model, group, connections),
        }

    def judge(shown: list[Plain]) -> Plain:
        require_equal([mine["asked"] for mine in shown], "watch()", _REMEDIES)
        devices = [_device(mine["device"]) for mine in shown]
        kinds = tuple(device.kind for device in devices)
        if group is not None and len(kinds) > 1:
            check_backends(kinds, [mine["backends"] for mine in shown])
        dtype = torch.bfloat16 if any(mine["bf16"] for mine in shown) else torch.float32
        compiled = any(mine["compiled"] for mine in shown)
        for sentence in require(devices, dtype=dtype, compiled=compiled):
            logger.warning("%s", sentence)
        # One rank without measured times leaves the leader without a split to compute.
        reasons = (mine["not_measured"] for mine in shown)
        cards = [mine["card"] for mine in shown]
        return {
            "kinds": kinds,
            "sharing": [cards.count(card) if card else 1 for card in cards],
            "not_measured": next(filter(None, reasons), ""),
        }

    return agree(show, judge)


def why_not_measured(
    model: nn.Module, group: dist.ProcessGroup | None, connections: int | None
) -> str:
    """Return why this rank's work cannot be separated from its waits; empty if it can."""
    if group is None:  # no other ranks to wait for
        return ""
    nccl = backend_of("cuda", dist.get_backend_config(group)) == "nccl"
    if connections == 1 and nccl and device_of(model).type == "cuda":
        return (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 makes kernels queue behind NCCL's waits for other "
            "ranks, so these waits count as work; unset the variable to measure steps"
        )
    return uncounted(model)


def require_engine(model: nn.Module, world_size: int) -> None:
    """Raise a `ConfigError` unless an engine averages every trainable parameter."""
    if not averages(model) and any(p.requires_grad for p in model.parameters()):
        raise usage_errors.bare(type(model).__name__, world_size)
    if name := not_averaged(model):
        raise usage_errors.not_averaged(name, world_size)


def not_averaged(model: nn.Module) -> str:
    """Return the name of a trainable parameter that no engine in a model averages, if any.

    An engine that is neither DDP nor FSDP2 is taken to average all its parameters.
    """
    averaged: set[int] = set()  # by identity: names differ between a model and the engine inside it
    for engine in engines_in(model):
        averaged.update(map(id, _averaged_by(engine)))
    return next(
        (n for n, p in model.named_parameters() if p.requires_grad and id(p) not in averaged), ""
    )


def _averaged_by(engine: Any) -> Iterator[Any]:
    if isinstance(engine, DistributedDataParallel):
        ignored = engine.parameters_to_ignore
        yield from (p for name, p in engine.module.named_parameters() if name not in ignored)
        yield from getattr(engine, "_delay_all_reduce_params", ())
    elif is_of_fsdp(engine, "FSDPModule"):
        for group in parameter_groups(engine):
            for one in group.fsdp_params:
                # Which of the two the module has depends on whether it is gathered.
                yield one.sharded_param
                yield getattr(one, "_unsharded_param", None)
    else:
        yield from engine.parameters()


def _require_module(model: object) -> None:
    if of_pipeline(model):
        raise pipelined(model)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"watch() got a {type(model).__name__}; it takes the model that is trained, a "
            "torch.nn.Module such as DistributedDataParallel(net)"
        )


def _outline(model: nn.Module) -> str:
    """Return a text that is equal for models with parameters of the same shapes, in order."""
    shapes = repr([tuple(p.shape) for p in model.parameters()])
    return hashlib.sha256(shapes.encode()).hexdigest()[:16]


def _check_drift(model: nn.Module, drift_check: int | None) -> None:
    if drift_check is None:
        return
    check_whole("drift_check", drift_check, least=0)
    if drift_check and is_sharded(model):
        raise ConfigError(
            f"drift_check={drift_check} compares weights of which every rank has a copy, but the "
            "ranks of a sharded model have different parts; leave it out"
        )


def device_of(model: nn.Module) -> torch.device:
    """Return the device that a model computes on; the CPU if it has no parameters.

    FSDP2 may keep the parameters on the host and move them to the device when they are needed.
    """
    groups = (group for part in fsdp_parts(model) for group in parameter_groups(part))
    sharded = (group.device for group in groups)
    return next(chain(sharded, (p.device for p in model.parameters())), torch.device("cpu"))


def _device(plain: Plain) -> RankDevice:
    capability = plain["capability"]
    values = {**plain, "arch_list": tuple(plain["arch_list"])}
    values["capability"] = None if capability is None else tuple(capability)
    return RankDevice(**values)


def _by_inductor(model: nn.Module) -> bool:
    """Return whether a model is compiled by Inductor, which needs a compiler on its machine.

    Other backends of torch.compile need none. Torch has no public way to read the backend.
    """
    if engine_of(model) is model:
        return False
    backend: Any = getattr(getattr(model, "dynamo_ctx", None), "callback", None)
    for _ in range(4):
        if backend is None or "Inductor" in type(backend).__name__:
            break
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    return backend is not None and "Inductor" in type(backend).__name__
