"""What is trained, told once to the trace: for plans, which have no model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from evenstride.runtime.agreement import Plain
from evenstride.runtime.leader import Leader
from evenstride.runtime.sampler import Order


def workload_facts(models: Sequence[nn.Module], samples: int) -> Plain:
    """Return the facts of a workload as JSON types.

    Args:
        models: that are watched.
        samples: of an epoch.

    Returns:
        ``parameters`` (how many numbers are trained), ``gradient_bytes`` (of all of them),
        ``digest`` (of their names, shapes and types), ``samples`` and ``device`` (what computes,
        as its maker calls it; empty if not known).

    Cost:
        O(parameters' names), once.
    """
    trained = [
        (name, parameter)
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    shapes = sorted(f"{_plain(name)} {tuple(p.shape)} {p.dtype}" for name, p in trained)
    device = trained[0][1].device if trained else torch.device("cpu")
    return {
        "parameters": sum(p.numel() for _, p in trained),
        "gradient_bytes": sum(p.numel() * p.element_size() for _, p in trained),
        "digest": hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16],
        "samples": samples,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
    }


def tell_workload(leader: Leader | None, models: Sequence[nn.Module], order: Order | None) -> None:
    """Write into the trace what is trained; nothing without a leader, a watched model or data."""
    if leader is not None and models and order is not None:
        leader.note("workload", **workload_facts(models, order.length))


def _plain(name: str) -> str:
    """Return a parameter's name without what wrappers put before it."""
    return name.removeprefix("module.").replace("_orig_mod.", "")
