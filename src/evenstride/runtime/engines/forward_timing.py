"""Time a model's forward pass without the collectives inside it, and know its state."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstride.runtime.timing.rank_clock import RankClock

_BROADCAST = "_evenstride_broadcast"


def engine_of(model: nn.Module) -> nn.Module:
    """Return the model itself, out of torch.compile's wrapper."""
    engine = getattr(model, "_orig_mod", model)
    assert isinstance(engine, nn.Module), "torch.compile wraps modules"
    return engine


def watch_forward(model: nn.Module, clock: RankClock) -> None:
    """Count what DDP does before the module's own forward pass as waiting.

    DDP broadcasts the buffers there, if the module has any; a fast rank would spend the time
    waiting for rank 0 and look slow. In evaluation it is kept from doing so: a rank without a
    batch would never come to that broadcast. Other wrappers synchronise later and need nothing.
    """
    engine = engine_of(model)
    if not isinstance(engine, DistributedDataParallel):
        return
    if not (engine.broadcast_buffers and any(True for _ in engine.module.buffers())):
        return  # nothing to synchronise, and hooks would slow every forward pass down

    def outer(*_: Any) -> None:
        clock.timer.wait_began()
        if not engine.training:
            engine.require_forward_param_sync = False  # DDP sets it anew after each forward pass

    def inner(*_: Any) -> None:
        clock.timer.wait_ended()
        setattr(engine, _BROADCAST, engine.training)

    def after(*_: Any) -> None:
        setattr(engine, _BROADCAST, False)

    # Compiled, they would record events inside the graph, which goes wrong on CUDA.
    eager: Any = torch.compiler.disable
    engine.register_forward_pre_hook(eager(outer))
    engine.module.register_forward_pre_hook(eager(inner), prepend=True)
    engine.register_forward_hook(eager(after))


def reforward(model: nn.Module) -> None:
    """Prepare for another forward pass in place of one that failed.

    DDP broadcasts buffers once per step, and had done so when the module's own pass began; the
    other ranks would not take part in a second time.
    """
    engine = engine_of(model)
    if getattr(engine, _BROADCAST, False) and isinstance(engine, DistributedDataParallel):
        engine.require_forward_param_sync = False
        setattr(engine, _BROADCAST, False)


def compiled(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, is compiled by `torch.compile`."""
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        for part in model.modules()
    )


def static_graph(model: nn.Module) -> bool:
    """Return whether DDP records the model's graph in its first step, to rely on it later."""
    engine = engine_of(model)
    return isinstance(engine, DistributedDataParallel) and bool(engine.static_graph)


def averages(model: nn.Module) -> bool:
    """Return whether something in a model, or held by it, averages gradients over ranks.

    DDP and FSDP2 do, also deep inside wrappers of other libraries, in ``torch.compile``'s, and in
    a plain attribute of a wrapper. So does whatever has a ``no_sync`` of its own.
    """
    parts = list(model.modules())
    held = (inner for part in parts for one in _held(part) for inner in one.modules())
    return any(map(_is_engine, parts)) or any(map(_is_engine, held))


def _is_engine(part: object) -> bool:
    return hasattr(part, "set_requires_gradient_sync") or hasattr(part, "no_sync")


def _held(part: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that a module holds without being their parent."""
    for name, value in list(vars(part).items()):
        if name == "_modules":
            continue
        values = value.values() if isinstance(value, dict) else value
        for one in values if isinstance(value, (list, tuple, dict)) else (value,):
            if isinstance(one, nn.Module):
                yield one


def engine_exists() -> bool:
    """Return whether this process has any module that averages gradients over ranks.

    Looks through all objects, which takes tens of milliseconds.
    """
    if _engine_among(gc.get_objects()):
        return True
    if not gc.get_freeze_count():
        return False
    gc.unfreeze()  # frozen objects are not listed
    try:
        return _engine_among(gc.get_objects())
    finally:
        gc.freeze()


def _engine_among(objects: list[Any]) -> bool:
    # By type, because some objects answer isinstance() and hasattr() with code of their own.
    kinds = set(map(type, objects))
    return any(issubclass(kind, nn.Module) and _is_engine(kind) for kind in kinds)


def bypassed(model: nn.Module) -> bool:
    """Return whether a DDP's module has gradients although the DDP itself seems never to have run.

    ``torch.compile`` hides that it has; `gradient_digest` tells.
    """
    engine = engine_of(model)
    if not isinstance(engine, DistributedDataParallel):
        return False
    ran = getattr(engine, "_lazy_init_ran", True)  # torch sets it in the first forward pass
    return not ran and any(p.grad is not None for p in engine.parameters())


def gradient_digest(model: nn.Module) -> str:
    """Return a text that is equal on all ranks if the model's gradients were averaged."""
    gradient = next(p.grad for p in model.parameters() if p.grad is not None)
    sample = gradient.detach().flatten()[:4096].to("cpu", torch.float64)
    return hashlib.sha256(sample.numpy().tobytes()).hexdigest()[:16]
