"""Holding back an engine's synchronisation, for each kind of engine."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstride.errors import UsageError
from evenstride.runtime.late import LateSync, syncs_late
from evenstride.runtime.sharded import held_back, is_sharded


def hold_back(
    model: nn.Module, *, last: bool, world_size: int, late: LateSync | None
) -> AbstractContextManager[None]:
    """Return a context in which a micro-batch's passes synchronise only if it is the step's last.

    Args:
        model: the engine.
        last: whether it is the last one.
        world_size: number of ranks; one rank may do without an engine.
        late: makes DDP ready when the loss is scaled, inside a guard; ``None`` outside.

    Raises:
        UsageError: the model cannot hold back its synchronisation.
    """
    engine: Any = model
    if is_sharded(model):
        return held_back(model, last=last)
    if last and late is not None and isinstance(engine, DistributedDataParallel):
        return late.held(engine) if syncs_late(model) else contextlib.nullcontext()
    if last or (world_size == 1 and not hasattr(engine, "no_sync")):
        return contextlib.nullcontext()
    if hasattr(engine, "no_sync"):
        no_sync: AbstractContextManager[None] = engine.no_sync()
        return no_sync
    raise UsageError(
        f"accumulate() got a {type(model).__name__}, which cannot hold back its "
        "synchronisation; give it the DistributedDataParallel (or FSDP) model itself"
    )
