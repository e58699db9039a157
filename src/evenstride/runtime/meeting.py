"""What the ranks show each other of the model they watch, and what cannot be on such ranks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from evenstride.runtime.agreement import Plain
from evenstride.runtime.devices import Device, check_backends, read_device, require
from evenstride.runtime.sharded import check_engine
from evenstride.runtime.watch import engine_of


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def show_model(model: nn.Module, world_size: int) -> Plain:
    """Return what the other ranks must know of this rank's model, as JSON types.

    Raises:
        ConfigError: its engine cannot be made exact, whatever the other ranks have.
    """
    device = device_of(model)
    check_engine(model, [device.type] * world_size)
    return {
        "device": asdict(read_device(device)),
        "bf16": any(p.dtype is torch.bfloat16 for p in model.parameters()),
        "compiled": _by_inductor(model),
    }


def judge_models(shown: list[Plain], backend_config: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the kind of every rank's device, and sentences about what is possible but slow.

    Args:
        shown: by `show_model`, in rank order.
        backend_config: of the process group, as torch names it.

    Raises:
        ConfigError: the ranks would hang in different backends, or some rank's device lacks what
            is asked of it.
    """
    devices = [_device(mine["device"]) for mine in shown]
    kinds = tuple(device.kind for device in devices)
    if len(kinds) > 1:
        check_backends(kinds, backend_config)
    dtype = torch.bfloat16 if any(mine["bf16"] for mine in shown) else torch.float32
    told = require(devices, dtype=dtype, compiled=any(mine["compiled"] for mine in shown))
    return kinds, list(told)


def _device(plain: Plain) -> Device:
    capability = plain["capability"]
    values = {**plain, "arch_list": tuple(plain["arch_list"])}
    values["capability"] = None if capability is None else tuple(capability)
    return Device(**values)


def _by_inductor(model: nn.Module) -> bool:
    """Return whether a model is compiled by what needs a compiler on its machine.

    Other backends of torch.compile do not, and which one it is, torch tells nowhere in public.
    """
    if engine_of(model) is model:
        return False
    backend: Any = getattr(getattr(model, "dynamo_ctx", None), "callback", None)
    for _ in range(4):
        if backend is None or "Inductor" in type(backend).__name__:
            break
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    return backend is not None and "Inductor" in type(backend).__name__
