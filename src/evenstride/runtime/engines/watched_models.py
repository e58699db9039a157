"""The models that a rank trains, and their kind: engine, sharding, compilation."""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class WatchedModels:
    """The models that were given to `Stride.watch`, with all their parameters."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.parameters: list[nn.Parameter] = []
        self.sharded = self.compiled = False
        """Whether one of them is."""
        self.compiled_by_shape = False
        """Whether one of them may be compiled again for each batch size."""
        self.unrecorded = False
        """Whether DDP still has to record the static graph of one, in its first step."""

    def add(self, model: nn.Module) -> None:
        self.models.append(model)
        self.parameters += model.parameters()
        self.unrecorded = self.unrecorded or static_graph(model)
        self.sharded = self.sharded or is_sharded(model)
        if compiled(model):
            self.compiled = True
            self.compiled_by_shape = self.compiled_by_shape or not _dynamic(model)

    def recorded(self) -> None:
        """Note that a step was synchronised, so that every graph is recorded."""
        self.unrecorded = False

    @property
    def without_gradients(self) -> bool:
        return all(p.grad is None for p in self.parameters)

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def clear(self) -> None:
        """Release the models."""
        # The last owner of a process group joins its threads, which may wait for the interpreter
        # lock in order to free a tensor: a deadlock. DDP's reducer holds that lock meanwhile.
        # Python's reference, which is released last here, does not (pytorch/pytorch#154976).
        engines = (engine for model in self.models for engine in engines_in(model))
        groups = [getattr(engine, "process_group", None) for engine in engines]
        self.models.clear()
        self.parameters.clear()
        del groups


def engine_of(model: nn.Module) -> nn.Module:
    """Return the model itself, without torch.compile's wrapper."""
    engine = getattr(model, "_orig_mod", model)
    assert isinstance(engine, nn.Module), "torch.compile wraps modules"
    return engine


def is_sharded(model: nn.Module) -> bool:
    """Return whether any part of a model uses FSDP2."""
    if is_of_fsdp(model, "FSDPModule"):
        return True
    # A short cut for models in DDP.
    return not hasattr(model, "no_sync") and bool(fsdp_parts(model))


def fsdp_parts(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was applied to, outer before inner."""
    return [part for part in model.modules() if is_of_fsdp(part, "FSDPModule")]


def is_of_fsdp(part: nn.Module, name: str) -> bool:
    """Return whether a module has a class of FSDP, given its name.

    Does not import FSDP, which takes half as long as torch; such a module exists only after the
    import.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(part, getattr(fsdp, name))


def compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` compiles a model or a part of it."""
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        for part in model.modules()
    )


def _dynamic(model: nn.Module) -> bool:
    """Return whether all compilations of a model are for any batch size (``dynamic=True``)."""
    parts = list(model.modules())
    if any(getattr(part, "_compiled_call_impl", None) is not None for part in parts):
        return False  # `Module.compile` keeps no record of it
    contexts = [part.dynamo_ctx for part in parts if hasattr(part, "dynamo_ctx")]
    return bool(contexts) and all(getattr(one, "_dynamic", None) is True for one in contexts)


def static_graph(model: nn.Module) -> bool:
    """Return whether DDP records the model's graph in its first step and relies on it later."""
    engine = engine_of(model)
    return isinstance(engine, DistributedDataParallel) and bool(engine.static_graph)


def averages(model: nn.Module) -> bool:
    """Return whether something in a model, or held by it, averages gradients over ranks.

    DDP and FSDP2 do, also deep inside other libraries' and ``torch.compile``'s wrappers, and in a
    plain attribute of a wrapper. Any module with a ``no_sync`` method does, too.
    """
    return any(True for _ in engines_in(model))


def engines_in(model: nn.Module) -> Iterator[nn.Module]:
    """Yield what averages gradients in a model or is held by it; see `averages`."""
    parts = list(model.modules())
    yield from filter(_is_engine, parts)
    held = (inner for part in parts for one in _held(part) for inner in one.modules())
    yield from filter(_is_engine, held)


def _is_engine(part: object) -> bool:
    return hasattr(part, "set_requires_gradient_sync") or hasattr(part, "no_sync")


def _held(part: nn.Module) -> Iterator[nn.Module]:
    for name, value in list(vars(part).items()):
        if name == "_modules":
            continue
        values = value.values() if isinstance(value, dict) else value
        for one in values if isinstance(value, (list, tuple, dict)) else (value,):
            if isinstance(one, nn.Module):
                yield one


def engine_exists() -> bool:
    """Return whether this process has any module that averages gradients over ranks.

    Reads all objects, which takes tens of milliseconds.
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
    # By type, because some objects run code of their own in isinstance() and hasattr().
    # By id, because a class cannot be hashed if its metaclass defines only equality.
    kinds = {id(type(one)): type(one) for one in objects}
    return any(issubclass(kind, nn.Module) and _is_engine(kind) for kind in kinds.values())


def bypassed(model: nn.Module) -> bool:
    """Return whether a DDP's module has gradients although the DDP itself seems not to have run.

    ``torch.compile`` hides that it ran; `gradient_digest` then decides.
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
