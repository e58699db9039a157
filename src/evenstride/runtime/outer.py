"""The outer optimizer of local SGD: what is made of the average of all ranks' weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from evenstride.runtime.averaging import sums_as


class Outer:
    """Steps from the weights at a round's start, by what the round has changed on average.

    The outer gradient is the weights at the round's start less the average at its end. It is
    applied as `torch.optim.SGD` does with ``nesterov=True``: with outer gradient ``g``, momentum
    ``m`` and rate ``r``, the velocity becomes ``v = m v + g`` and the weights ``start - r (g + m
    v)``. With rate 1 and no momentum that is the average, which is then taken as it is.

    Args:
        rate: outer step size, above 0.
        momentum: from 0 to below 1.

    Source:
        DiLoCo (Douillard et al., 2023, arXiv 2311.08105) has this outer gradient and Nesterov
        momentum, as others restate it; the paper itself was not at hand. Not verified: that it
        means torch's form of Nesterov momentum, which starts with ``v = g``, and not another.
        Ranks count by their samples here, not alike.
    """

    def __init__(self, rate: float, momentum: float) -> None:
        self._rate, self._momentum = rate, momentum
        self._starts: dict[nn.Parameter, Tensor] = {}
        self._velocities: dict[nn.Parameter, Tensor] = {}

    @property
    def plain(self) -> bool:
        """Whether the average itself is the result."""
        return self._rate == 1.0 and not self._momentum

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep the weights of parameters whose round begins; those of others stay.

        Cost:
            A copy of the parameters per round; none where it is `plain`.
        """
        if self.plain:
            return
        for parameter in parameters:
            if parameter not in self._starts:
                self._starts[parameter] = parameter.detach().clone()

    def forget(self) -> None:
        """Let rounds begin anew: weights came from elsewhere."""
        self._starts.clear()

    @torch.no_grad()
    def step(self, parameter: nn.Parameter, average: Tensor) -> None:
        """Set a parameter to what its round leads to.

        Args:
            parameter: whose round has ended; one that never began takes the average.
            average: of it over the ranks; overwritten.
        """
        start = self._starts.pop(parameter, None)
        if start is None:
            parameter.copy_(average)
            return
        start = start.to(average.dtype)
        gradient = torch.sub(start, average, out=average)
        if self._momentum:
            velocity = self._velocity(parameter).mul_(self._momentum).add_(gradient)
            gradient = gradient.add(velocity, alpha=self._momentum)
        parameter.copy_(start.sub_(gradient, alpha=self._rate))

    def state(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the velocities by name, the same on all ranks; none without momentum."""
        if not self._momentum:
            return {}
        return {name: self._velocity(parameter) for name, parameter in parameters.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        """Take over velocities that `state` returned; names that are not there keep theirs."""
        for name, saved in state.items():
            if name in parameters and self._momentum:
                self._velocity(parameters[name]).copy_(saved)

    def _velocity(self, parameter: nn.Parameter) -> Tensor:
        if parameter not in self._velocities:
            zeros = torch.zeros_like(parameter, dtype=sums_as(parameter.dtype))
            self._velocities[parameter] = zeros.detach()
        return self._velocities[parameter]
