"""The models that a rank trains, and what is particular to their engines."""

from __future__ import annotations

from torch import nn

from evenstride.runtime.engines.forward_timing import compiled, static_graph
from evenstride.runtime.engines.fsdp import is_sharded


class WatchedModels:
    """The models that `Stride.watch` was given, with all their parameters."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.parameters: list[nn.Parameter] = []
        self.sharded = self.compiled = False
        """Whether one of them is."""
        self.unrecorded = False
        """Whether DDP still has to record the static graph of one, in its first step."""

    def add(self, model: nn.Module) -> None:
        """Know one more model."""
        self.models.append(model)
        self.parameters += model.parameters()
        self.unrecorded = self.unrecorded or static_graph(model)
        self.sharded = self.sharded or is_sharded(model)
        self.compiled = self.compiled or compiled(model)

    def recorded(self) -> None:
        """Note that a step has been synchronised, and with it every graph recorded."""
        self.unrecorded = False

    @property
    def without_gradients(self) -> bool:
        """Whether no parameter has a gradient."""
        return all(p.grad is None for p in self.parameters)

    def drop_gradients(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self.parameters:
            parameter.grad = None

    def clear(self) -> None:
        """Let go of all of them."""
        self.models.clear()
        self.parameters.clear()
