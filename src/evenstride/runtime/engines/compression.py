"""Gradients that travel as bfloat16, also over Gloo, where torch refuses its own hook."""

# No postponed annotations here: torch compares the hook's with its own types.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evenstride.errors import ConfigError
from evenstride.runtime.engines.forward_timing import engine_of

COMPRESSIONS = ("bf16",)


def check_compression(model: nn.Module, compress: str | None) -> None:
    """Raise unless the model's gradients can travel as is asked.

    Raises:
        ConfigError: there is no such compression, or the model's engine takes no hooks.
    """
    if compress is None:
        return
    if compress not in COMPRESSIONS:
        raise ConfigError(
            f"compress is {compress!r}; possible are {', '.join(map(repr, COMPRESSIONS))}, or None "
            "to send gradients as they are"
        )
    if not isinstance(engine_of(model), DistributedDataParallel):
        raise ConfigError(
            f"compress={compress!r} works for DistributedDataParallel, not for a "
            f"{type(engine_of(model)).__name__}; leave it out (FSDP2 has MixedPrecisionPolicy)"
        )


def send_compressed(model: nn.Module) -> None:
    """Let DDP send its gradients in half the bytes, rounded to 8 bits and summed in bfloat16.

    Raises:
        ConfigError: the model has a communication hook of its own.
    """
    engine: Any = engine_of(model)
    try:
        engine.register_comm_hook(engine.process_group, as_bf16)
    except RuntimeError as error:
        raise ConfigError(
            f"compress='bf16' needs the model's communication hook, and torch says: {error}; use "
            "one of the two"
        ) from error


def as_bf16(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch looks for both names
) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks with bfloat16 on the way; a DDP communication hook.

    The same bytes come back to every rank, so replicas stay equal.
    """
    whole = bucket.buffer()
    small = whole.to(torch.bfloat16).div_(dist.get_world_size(group))
    work = dist.all_reduce(small, group=group, async_op=True)
    assert work is not None, "this rank is in the group"

    def back(_: Any) -> Tensor:
        copied: Tensor = whole.copy_(small)
        return copied

    returned: torch.futures.Future[Tensor] = work.get_future().then(back)
    return returned
