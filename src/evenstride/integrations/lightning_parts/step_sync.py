"""``fabric.no_backward_sync`` for ranks with different numbers of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

from evenstride.errors import UsageError


class StepSync(_BackwardSyncControl):  # type: ignore[misc]
    """``fabric.no_backward_sync``, also for ranks with different numbers of micro-batches."""

    def __init__(self, plain: Any, pieces: Callable[[], Any]) -> None:
        # `pieces` returns the `Stride`, or ``None`` if each share is one batch.
        self._plain, self._pieces = plain, pieces

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        """Return the context; raise `UsageError` where ranks would average different steps."""
        stride = self._pieces()
        if stride is None:
            return self._plain.no_backward_sync(module, enabled)
        if enabled == stride.synced:
            raise UsageError(
                f"no_backward_sync(enabled={enabled}) in a batch with synced={stride.synced}: the "
                "ranks have different numbers of micro-batches, so the loop must not count them; "
                "use enabled=not fabric.strategy.stride.synced"
            )
        return stride.accumulate(module)
