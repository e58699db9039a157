"""The optimizer of live mode: it steps if the step in hand may be kept, else it does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from evenstride.errors import UsageError


class VotingOptimizer(Optimizer):
    """Votes before it steps; see `LiveStride.optimizer`.

    Args:
        optimizer: that steps.
        vote: returns whether the step may be kept; the same for all optimizers of a step.
    """

    def __init__(self, optimizer: Optimizer, vote: Callable[[], bool]) -> None:
        # Nothing of the base class is used but its type, which schedulers ask for.
        self.inner, self._vote = optimizer, vote

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step if this worker may keep the step in hand, else drop its gradients.

        Raises:
            UsageError: with a closure, which would run more than one backward pass.
        """
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure) was called, and a step is voted on once, after its one "
                "backward pass; use an optimizer that needs no closure"
            )
        if self._vote():
            self.inner.step()
        else:
            self.inner.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer that steps."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the optimizer that steps."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give it more parameters."""
        self.inner.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimizer that steps."""
        return self.inner.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """That of the optimizer that steps."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the optimizer that steps."""
        return self.inner.defaults
