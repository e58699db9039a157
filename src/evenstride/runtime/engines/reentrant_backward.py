"""Keep DDP's wait apart from work where it happens inside a reentrant backward pass.

``torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`` runs a backward pass of its own
inside the one that the script started. If the last gradient of the step comes from there, DDP
waits for the other ranks when the inner pass ends. The mark at the end of the outer pass comes
after that wait, which would then count as work.

Callbacks of a pass run in the order in which they are queued, and a parameter's own hook runs
before DDP's. So a hook on the parameter whose gradient comes last queues a mark in front of DDP's
wait. The first step shows which parameter that is; later steps call one hook per model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from evenstride.runtime.timing.rank_clock import RankClock


class _ModelHooks:
    """The hooks on the parameters of one model."""

    def __init__(self) -> None:
        self.handles: dict[Tensor, RemovableHandle] = {}
        self.last: Tensor | None = None  # whose gradient was accumulated last

    def accumulated(self, parameter: Tensor) -> None:
        """Note that a parameter's gradient was accumulated."""
        self.last = parameter

    def remove(self) -> None:
        """Remove all hooks."""
        self.last = None
        self.keep_last()

    def keep_last(self) -> None:
        """Remove all hooks but that of the parameter that came last."""
        for parameter in [p for p in self.handles if p is not self.last]:
            self.handles.pop(parameter).remove()


class InnerWaits:
    """Marks the waits of DDP models inside reentrant backward passes.

    Args:
        clock: gets the marks.
    """

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock
        self._models: list[_ModelHooks] = []
        self._learning: list[_ModelHooks] = []
        self._outer = self._marked = -1  # passes: that of the loss, and the latest inner one

    def watch(self, engine: DistributedDataParallel) -> None:
        """Mark the waits of one more model."""
        ignored = getattr(engine, "parameters_to_ignore", ())
        model = _ModelHooks()
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad and name not in ignored:
                hook = partial(self._accumulated, model)
                register: Any = parameter.register_post_accumulate_grad_hook
                model.handles[parameter] = register(hook)
        self._models.append(model)
        self._learning.append(model)

    def backward_began(self) -> None:
        """Note which pass the loss belongs to. Call it inside that pass."""
        self._outer = torch._C._current_graph_task_id()

    def gradients_ready(self) -> None:
        """Note that a backward pass that synchronises has come to its last gradient."""
        if self._learning:
            for model in self._learning:
                if model.last is not None:
                    model.keep_last()
            self._learning = [model for model in self._learning if model.last is None]

    def close(self) -> None:
        """Remove all hooks."""
        for model in self._models:
            model.remove()
        self._models.clear()
        self._learning.clear()

    def _accumulated(self, model: _ModelHooks, parameter: Tensor) -> None:
        model.accumulated(parameter)
        inner = torch._C._current_graph_task_id()
        if inner not in (self._outer, self._marked):
            self._marked = inner
            Variable._execution_engine.queue_callback(self._wait_began)

    def _wait_began(self) -> None:
        self._clock.timer.wait_began()
        Variable._execution_engine.queue_callback(self._clock.timer.wait_ended)
