"""Postpones an engine's all-reduce, and makes DDP ready for it only when the loss is scaled.

DDP prepares the synchronisation of the next backward pass as soon as a forward pass has ended. If
memory runs out after that (in the loss or in another model), the passes that repeat the batch would
synchronise half a gradient, which cannot be undone. So inside a guard the forward pass runs as if
its synchronisation were postponed, and DDP is prepared at the last moment.
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
    late: LateSync | None,  # inside a guard: prepares DDP when the loss is scaled
) -> AbstractContextManager[None]:
    """Return a context in which only the step's last micro-batch synchronises."""
    engine: Any = model
    if is_sharded(model):
        return held_back(model, last=last)
    if last and late is not None and isinstance(engine, DistributedDataParallel):
        return late.held(engine) if syncs_late(model) else contextlib.nullcontext()
    # A single rank needs no engine.
    if last or (world_size == 1 and not hasattr(engine, "no_sync")):
        return contextlib.nullcontext()
    if hasattr(engine, "no_sync"):
        no_sync: AbstractContextManager[None] = engine.no_sync()
        return no_sync
    raise UsageError(
        f"accumulate() got a {type(model).__name__}, which cannot postpone its all-reduce; give "
        "it the DistributedDataParallel (or FSDP) model itself"
    )


def syncs_late(model: nn.Module) -> bool:
    """Return whether a model's forward pass can be repeated until its loss is scaled."""
    # The state of a forward pass under torch.compile is unknown.
    if hasattr(model, "_orig_mod"):
        return False
    # A model without an engine synchronises nothing. A static graph records what the forward pass
    # prepares.
    return not isinstance(model, DistributedDataParallel) or not model.static_graph


class LateSync:
    """The engines that are prepared when the loss of the current batch is scaled."""

    def __init__(self) -> None:
        self._waiting: list[DistributedDataParallel] = []

    @contextlib.contextmanager
    def held(self, engine: DistributedDataParallel) -> Iterator[None]:
        """Postpone the preparation of an engine inside, until `make_ready`."""
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
        # DDP finds unused parameters by walking the loss's graph.
        if engine.find_unused_parameters:
            raise UsageError(
                "accumulate() ended before the loss was scaled, but find_unused_parameters "
                "needs the loss; put forward, scale and backward inside "
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
    """Postpones the engine's all-reduce to the step's last micro-batch."""

    def __init__(self, batch: BatchInHand, world_size: int, *, by_engine: bool) -> None:
        self._batch, self._world_size, self._by_engine = batch, world_size, by_engine
        self.late = LateSync()
        self.active = False
        """Whether the loop is inside `accumulate`."""
        self.held: list[nn.Module] = []
        """Models given to `accumulate` for the current batch inside a guard."""
        self._guarding = False

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Make every pass in this context repeatable."""
        self._guarding = True
        try:
            yield
        finally:
            self._guarding = False

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        """Postpone the all-reduce unless this is the step's last micro-batch."""
        self._batch.refuse_after_failure()
        draw = self._batch.draw
        if draw is None:
            raise UsageError(
                "accumulate() was called outside the training loop; call it inside "
                "`for batch in loader:`, around the forward and backward pass"
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
