"""Time a model's forward pass without the collectives inside it, and know its state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstride.runtime.timing import StepTimer

logger = logging.getLogger("evenstride")

_BROADCAST = "_evenstride_broadcast"


def engine_of(model: nn.Module) -> nn.Module:
    """Return the model itself, out of torch.compile's wrapper."""
    engine = getattr(model, "_orig_mod", model)
    assert isinstance(engine, nn.Module), "torch.compile wraps modules"
    return engine


def watch_forward(model: nn.Module, timer: Callable[[], StepTimer], world_size: int) -> None:
    """Count what DDP does before the module's own forward pass as waiting.

    DDP broadcasts the buffers there, if the module has any; a fast rank would spend the time
    waiting for rank 0 and look slow. In evaluation it is kept from doing so: a rank without a
    batch would never come to that broadcast. Other wrappers synchronise later and need nothing.
    """
    engine = engine_of(model)
    if not isinstance(engine, DistributedDataParallel):
        if world_size > 1 and not _averages(engine):
            logger.warning(
                "watch() got a bare %s: nothing averages its gradients over the %d ranks; wrap it "
                "in DistributedDataParallel or FSDP first",
                type(engine).__name__,
                world_size,
            )
        return
    if not (engine.broadcast_buffers and any(True for _ in engine.module.buffers())):
        return  # nothing to synchronise, and hooks would slow every forward pass down

    def outer(*_: Any) -> None:
        timer().wait_began()
        if not engine.training:
            engine.require_forward_param_sync = False  # DDP sets it anew after each forward pass

    def inner(*_: Any) -> None:
        timer().wait_ended()
        setattr(engine, _BROADCAST, engine.training)

    def after(*_: Any) -> None:
        setattr(engine, _BROADCAST, False)

    engine.register_forward_pre_hook(outer)
    engine.module.register_forward_pre_hook(inner, prepend=True)
    engine.register_forward_hook(after)


def reforward(model: nn.Module) -> None:
    """Prepare for another forward pass in place of one that failed.

    DDP broadcasts buffers once per step, and had done so when the module's own pass began; the
    other ranks would not take part in a second time.
    """
    engine = engine_of(model)
    if getattr(engine, _BROADCAST, False) and isinstance(engine, DistributedDataParallel):
        engine.require_forward_param_sync = False
        setattr(engine, _BROADCAST, False)


def static_graph(model: nn.Module) -> bool:
    """Return whether DDP records the model's graph in its first step, to rely on it later."""
    engine = engine_of(model)
    return isinstance(engine, DistributedDataParallel) and bool(engine.static_graph)


def _averages(model: nn.Module) -> bool:
    """Return whether some part of the model is known to synchronise its gradients."""
    return any(
        hasattr(part, "set_requires_gradient_sync") or hasattr(part, "no_sync")
        for part in model.modules()
    )
