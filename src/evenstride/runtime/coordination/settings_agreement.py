"""The settings that each rank shows when a team forms, and those that must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenstride._version import __version__
from evenstride.core.policies import spec_of
from evenstride.core.policies.dynamic_batching import DynamicBatching
from evenstride.core.policies.static import Static
from evenstride.core.policy import Policy
from evenstride.errors import ConfigError
from evenstride.runtime.coordination.agreement import Plain, require_equal
from evenstride.runtime.engines.device_support import (
    accelerator,
    check_backends,
    check_chosen,
    has_chosen,
    likely_device,
)
from evenstride.runtime.engines.replica_groups import show_island
from evenstride.runtime.failures.peers import myself
from evenstride.runtime.host.machine_resources import measured_flops_per_s, usable_cores
from evenstride.runtime.settings import Settings, check

_OF_EACH_RANK = (
    "min_share",
    "max_share",
    "quantum",
    "resources",
    "accelerator",
    "backends",
    "uses_it",
    "peer",
    "island",
)


def show_settings(
    settings: Settings,
    rank: int,
    group: dist.ProcessGroup | None,
    shard_group: dist.ProcessGroup | None,
) -> Plain:
    """Return the settings that a rank shows, as JSON types; raise if a setting is invalid."""
    kind = accelerator(group)
    chosen = bool(kind) and has_chosen(kind, group)  # before the next lines use it
    device = likely_device(group)
    backends = "" if group is None else dist.get_backend_config(group)
    check(settings)
    return {
        "evenstride": __version__,
        "torch": torch.__version__.partition("+")[0],
        "global_batch": settings.global_batch,
        "seed": settings.seed,
        "policy": settings.policy,
        "sync": str(settings.mode),
        "engine": settings.engine,
        "noise_every": settings.noise_every,
        "bounds": None if settings.bounds is None else list(settings.bounds),
        "chosen": settings.chosen,
        "memory_fraction": settings.memory_fraction,
        "max_steps": settings.max_steps,
        "min_share": settings.min_share,
        "max_share": settings.max_share,
        "quantum": settings.quantum,
        "resources": _resources(settings.decides, device),
        "accelerator": kind,
        "backends": backends,
        "peer": myself(rank, device).to_plain(),
        "uses_it": chosen,
        "island": show_island(shard_group, group),
    }


def check_declared(policy: Policy[Any], assumed: Sequence[str], kinds: Sequence[str]) -> None:
    """Refuse FLOP/s that ``Stride()`` measured on another type of device than the models are on.

    Both types are those of every rank: the one that ``Stride()`` assumed, and the model's.
    """
    if not _declares_flops(policy) or len(kinds) < 2:
        return
    for rank, (declared, kind) in enumerate(zip(assumed, kinds, strict=True)):
        if declared != kind:
            chosen = declared if kind == "cpu" else kind
            raise ConfigError(
                f"policy {spec_of(policy)!r} splits the batch by FLOP/s, which Stride() measured "
                f"on the {declared} of rank {rank}, but its model is on {kind}; before Stride(), "
                f"call torch.{chosen}.set_device(local_rank) on the ranks that compute on {chosen}"
                ", and on no others"
            )


def _declares_flops(policy: Policy[Any]) -> bool:
    match policy:
        case Static(by="flops") | DynamicBatching():
            return True
    return False


def _resources(policy: Policy[Any], device: torch.device) -> Plain:
    """Return the resources of this worker that the policy needs; measuring them takes a moment."""
    match policy:
        case Static(by="cores"):
            return {"cores": usable_cores()}
        case Static(by="flops"):
            return {"flops_per_s": measured_flops_per_s(device)}
        case DynamicBatching():
            cores = {"cores": usable_cores()} if device.type == "cpu" else {}
            return {**cores, "flops_per_s": measured_flops_per_s(device)}
    return {}


def compare(shown: list[Plain], group: dist.ProcessGroup | None) -> None:
    """Raise unless ranks with these settings can train together.

    Raises `RanksDisagree` if settings differ, and `ConfigError` if the ranks would wait for each
    other in different backends.
    """
    common = [{k: v for k, v in mine.items() if k not in _OF_EACH_RANK} for mine in shown]
    require_equal(common, "Stride()")
    if group is None:
        return
    # Before the engine is created, in which such ranks hang. A rank that has an accelerator is
    # assumed to use it.
    kinds = [mine["accelerator"] or "cpu" for mine in shown]
    check_backends(kinds, [mine["backends"] for mine in shown])
    check_chosen(kinds, [mine["uses_it"] for mine in shown], dist.get_backend_config(group))
