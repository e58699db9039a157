"""Hold back an engine's synchronisation, and let DDP begin it when the loss is there.

DDP makes ready for the synchronisation of the next backward pass as soon as a forward pass has
ended. If memory ends between the two (in the loss, in another model), the passes that then take
its place would synchronise half a gradient, and there is no way back. So inside a guard the
forward pass runs as if it were held back, and DDP is made ready at the last moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evenstride.errors import UsageError
from evenstride.runtime.engines.fsdp import held_back
from evenstride.runtime.engines.watched_models import is_sharded
from evenstride.runtime.loss.batch_in_hand import BatchInHand


def hold_back(
    model: nn.Module,
    *,
    last: bool,
    world_size: int,
    late: LateSync | None,  # inside a guard: makes DDP ready when the loss is scaled
) -> AbstractContextManager[None]:
    """Return a context in which passes synchronise only in the step's last micro-batch."""
    engine: Any = model
    if is_sharded(model):
        return held_back(model, last=last)
    if last and late is not None and isinstance(engine, DistributedDataParallel):
        return late.held(engine) if syncs_late(model) else contextlib.nullcontext()
    # One rank may do without an engine.
    if last or (world_size == 1 and not hasattr(engine, "no_sync")):
        return contextlib.nullcontext()
    if hasattr(engine, "no_sync"):
        no_sync: AbstractContextManager[None] = engine.no_sync()
        return no_sync
    raise UsageError(
        f"accumulate() got a {type(model).__name__}, which cannot hold back its "
        "synchronisation; give it the DistributedDataParallel (or FSDP) model itself"
    )


def syncs_late(model: nn.Module) -> bool:
    """Return whether a model's forward pass can be repeated until its loss is scaled."""
    # What torch.compile makes of a forward pass cannot be told.
    if hasattr(model, "_orig_mod"):
        return False
    # A model without an engine has nothing to synchronise. A static graph is recorded by what the
    # forward pass makes ready.
    return not isinstance(model, DistributedDataParallel) or not model.static_graph


class LateSync:
    """The engines that are to be made ready when the loss of the batch in hand is scaled."""

    def __init__(self) -> None:
        self._waiting: list[DistributedDataParallel] = []

    @contextlib.contextmanager
    def held(self, engine: DistributedDataParallel) -> Iterator[None]:
        """Hold an engine back inside, until `make_ready`."""
        if not engine.require_backward_grad_sync:  # within its own no_sync
            yield
            return
        engine.require_backward_grad_sync = False
        self._waiting.append(engine)
        try:
            yield
            if engine in self._waiting:
                self._left_early(engine)
        finally:
            engine.require_backward_grad_sync = True
            if engine in self._waiting:
                self._waiting.remove(engine)

    def make_ready(self, loss: Tensor) -> None:
        """Let the waiting engines synchronise in the backward pass of ``loss``."""
        while self._waiting:
            _ready(self._waiting.pop(), [loss])

    def _left_early(self, engine: DistributedDataParallel) -> None:
        # DDP finds them by walking the loss's graph.
        if engine.find_unused_parameters:
            raise UsageError(
                "accumulate() was left before the loss was scaled, and find_unused_parameters "
                "needs it; put forward, scale and backward inside "
                "`with stride.guard(), stride.accumulate(model):`"
            )
        _ready(engine, [])


def _ready(engine: DistributedDataParallel, outputs: list[Tensor]) -> None:
    """Do what DDP does around a forward pass that is to be synchronised (torch 2.6 to 2.13)."""
    parts: Any = engine
    parts.require_backward_grad_sync = parts.require_forward_param_sync = True
    parts.reducer.prepare_for_forward()
    parts.reducer.prepare_for_backward(outputs if parts.find_unused_parameters else [])


class Accumulation:
    """Holds back the engine's synchronisation until the step's last micro-batch."""

    def __init__(self, batch: BatchInHand, world_size: int, *, by_engine: bool) -> None:
        self._batch, self._world_size, self._by_engine = batch, world_size, by_engine
        self.late = LateSync()
        self.active = False
        """Whether the loop is inside `accumulate`."""
        self.held: list[nn.Module] = []
        """Models that were held back for the batch in hand inside of a guard."""
        self._guarding = False

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Make every pass in this context one that can be repeated."""
        self._guarding = True
        try:
            yield
        finally:
            self._guarding = False

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        """Hold back the synchronisation unless this is the step's last micro-batch."""
        self._batch.refuse_after_failure()
        draw = self._batch.draw
        if draw is None:
            raise UsageError(
                "accumulate() was called outside the training loop; call it inside "
                "`for batch in loader:`, around forward and backward"
            )
        self.active = True
        if self._guarding:
            self.held.append(model)
        try:
            late = self.late if self._guarding and self._by_engine else None
            size = self._world_size if self._by_engine else 1
            with hold_back(model, last=draw.last, world_size=size, late=late):
                yield
        finally:
            self.active = False
