"""Weigh each batch's loss exactly, and notice when its step has been synchronised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from evenstride.core.weighting import loss_factor
from evenstride.errors import ScaleError, UsageError
from evenstride.runtime.ghost import silence, zero_loss
from evenstride.runtime.sampler import Draw
from evenstride.runtime.timing import StepTimer
from evenstride.runtime.weights import WeightExchange, checked

_MARK = "_evenstride_scaled"


@dataclass(slots=True)
class _Batch:
    """What has happened to the batch that the training loop holds."""

    draw: Draw
    weight: float | None = None  # from weight_fn
    scaled: bool = False
    backward: bool = False
    committed: bool = False


@dataclass(slots=True)
class Scaling:
    """The exact weighting of one rank.

    Args:
        world_size: ranks the engine averages over.
        timer: gets the marks of the backward pass.
        committed: called when a step's synchronisation has ended.
        exchange: makes the weight exchange when it is first needed; collective.
        micro: whether the loader may cut a share into micro-batches.
        model: the watched model.
    """

    world_size: int
    timer: StepTimer
    committed: Callable[[Draw], None]
    exchange: Callable[[], WeightExchange]
    micro: bool = False
    model: nn.Module | None = None
    own_s: float = 0.0
    _batch: _Batch | None = None
    _accumulating: bool = False
    _queued: bool = False
    _silenced: list[RemovableHandle] = field(default_factory=list)

    @property
    def draw(self) -> Draw | None:
        """The draw of the batch in the training loop's hands."""
        return None if self._batch is None else self._batch.draw

    @property
    def mid_step(self) -> bool:
        """Whether some, but not all, of the current step's backward passes have run."""
        batch = self._batch
        return (
            batch is not None and not batch.committed and (batch.backward or not batch.draw.first)
        )

    @property
    def failed(self) -> bool:
        """Whether a backward pass began to synchronise the step and never came through."""
        batch = self._batch
        return batch is not None and batch.backward and batch.draw.last and not batch.committed

    def begin(self, draw: Draw, weight: float | None) -> None:
        """Take note of a batch handed to the training loop."""
        self._batch = _Batch(draw, weight)
        self._queued = False

    def forget(self) -> None:
        """Drop the batch in hand: the loop was left."""
        self._batch = None

    def check_finished(self) -> None:
        """Raise unless the batch in hand was scaled and its backward pass ran.

        Raises:
            ScaleError: it was not.
        """
        batch = self._batch
        if batch is None:
            return
        if not batch.scaled:
            raise ScaleError(
                f"the batch of step {batch.draw.step} was never scaled, so its gradient would be "
                "wrong for unequal shares; call stride.scale(loss).backward() for every batch"
            )
        if not batch.backward:
            raise ScaleError(
                f"the loss of step {batch.draw.step} was scaled, but its backward pass never ran "
                "on this rank, and the other ranks would wait for it; run backward() for every "
                "batch (also for those you would rather skip: scale the loss by 0)"
            )

    def scale(self, loss: Tensor, weight: float | None) -> Tensor:
        """Return ``loss * W * n_k / N``; see `Stride.scale`."""
        started_s = self.timer.now()
        batch = self._checked(loss, weight)
        local, total, waited_s = self._weights(batch, weight)
        factor = loss_factor(self.world_size, local, total)
        scaled = loss * factor if factor else zero_loss(loss)
        if scaled.requires_grad:
            if not factor:
                self._silenced += silence(scaled, self.model)
            scaled.register_hook(self._backward_began)  # type: ignore[no-untyped-call]
        setattr(scaled, _MARK, True)
        batch.scaled = True
        self.own_s += self.timer.now() - started_s - waited_s
        return scaled

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        """Hold back the synchronisation unless this is the step's last micro-batch."""
        if self._batch is None:
            raise UsageError(
                "accumulate() was called outside the training loop; call it inside "
                "`for batch in loader:`, around forward and backward"
            )
        self._accumulating = True
        try:
            with contextlib.nullcontext() if self._batch.draw.last else self._held_back(model):
                yield
        finally:
            self._accumulating = False

    @contextlib.contextmanager
    def _held_back(self, model: nn.Module) -> Iterator[None]:
        engine: Any = model
        if hasattr(engine, "no_sync"):
            with engine.no_sync():
                yield
        elif hasattr(engine, "set_requires_gradient_sync"):  # FSDP2
            engine.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                engine.set_requires_gradient_sync(True)
        elif self.world_size == 1:
            yield
        else:
            raise UsageError(
                f"accumulate() got a {type(model).__name__}, which cannot hold back its "
                "synchronisation; give it the DistributedDataParallel (or FSDP) model itself"
            )

    def _checked(self, loss: Tensor, weight: float | None) -> _Batch:
        batch = self._batch
        if batch is None:
            raise ScaleError(
                "scale() was called outside the training loop; call it once per loss inside "
                "`for batch in loader:`"
            )
        if getattr(loss, _MARK, False):
            raise ScaleError(
                f"a loss of step {batch.draw.step} was scaled twice; call stride.scale once per "
                "loss, and scale the sum rather than its scaled parts"
            )
        if self.micro and not self._accumulating:
            raise ScaleError(
                "this loader cuts shares into micro-batches, so ranks run different numbers of "
                "backward passes; put forward, scale and backward inside "
                "`with stride.accumulate(model):`"
            )
        if weight is not None and (self.micro or batch.weight is not None):
            raise ScaleError(
                "scale(weight=...) needs one batch per rank and step; with micro-batches or a "
                "weight_fn give the loader a weight_fn instead, and call scale(loss) alone"
            )
        return batch

    def _weights(self, batch: _Batch, weight: float | None) -> tuple[float, float, float]:
        """Return this batch's weight, the step's, and the seconds spent waiting for it."""
        if weight is None and batch.weight is None:
            return batch.draw.samples, batch.draw.window, 0.0
        exchange, ghost = self.exchange(), batch.draw.samples == 0
        started_s = self.timer.now()
        if weight is not None:
            exchange.start(0.0 if ghost else checked(weight))
        local = weight if weight is not None else batch.weight
        total = exchange.total()
        assert local is not None, "one of the two weights is given"
        return 0.0 if ghost else float(local), total, self.timer.now() - started_s

    def _backward_began(self, grad: Tensor) -> None:
        """Ask the engine to tell when this rank's last gradient is there.

        Callbacks run in the order they are queued, after the whole graph: ours comes before the
        engine's own wait for other ranks, and one queued from inside it comes after.
        """
        del grad
        if self._queued or self._batch is None:
            return
        self._queued = True
        Variable._execution_engine.queue_callback(self._gradients_ready)

    def _gradients_ready(self) -> None:
        batch = self._batch
        self._queued = False
        if batch is None:
            return
        batch.backward = True
        if batch.draw.last:
            self.timer.gradients_ready()
            Variable._execution_engine.queue_callback(self._synchronised)
        else:
            self._loud_again()

    def _synchronised(self) -> None:
        batch = self._batch
        self.timer.synchronised()
        self._loud_again()
        if batch is not None and not batch.committed:
            batch.committed = True
            self.committed(batch.draw)

    def _loud_again(self) -> None:
        for handle in self._silenced:
            handle.remove()
        self._silenced.clear()
