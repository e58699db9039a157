"""What each sample costs, such as its number of tokens, where samples are far from equal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from evenstride.errors import ConfigError

CostFn = Callable[[int], float] | Sequence[float] | npt.NDArray[Any] | torch.Tensor
"""A function of a sample's index, or one number for each sample."""

# Samples that stand for the others where ranks compare their cost functions.
_PROBES = 64


class Costs:
    """The cost of the samples of a data set.

    Args:
        cost_fn: as given to the loader.
        length: samples in the data set.

    Raises:
        ConfigError: there is not one number per sample, or one is not positive and finite.
    """

    def __init__(self, cost_fn: CostFn, length: int) -> None:
        self._length = length
        self._function: Callable[[int], float] | None = None
        self._known = np.zeros(0)
        if callable(cost_fn):
            self._function = cost_fn
            return
        known = np.asarray(cost_fn, dtype=np.float64)
        if known.shape != (length,):
            raise ConfigError(
                f"cost_fn has shape {known.shape}; it must be a function of a sample's index, or "
                f"{length} numbers, one for each sample of the data set"
            )
        self._known = _checked(known, np.arange(length))

    def of(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the costs of some samples, ``(n,)``; quick if they were given as an array.

        Raises:
            ConfigError: one is not positive and finite.
        """
        if self._function is None:
            return np.asarray(self._known[indices])
        return _checked(np.array([self._cost(index) for index in indices.tolist()]), indices)

    def _cost(self, index: int) -> float:
        assert self._function is not None, "else the costs are known"
        try:
            return float(self._function(index))
        except Exception as error:
            raise ConfigError(
                f"cost_fn failed for sample {index} ({type(error).__name__}: {error}); it is "
                "called with a sample's index (not the sample) and must return a positive number"
            ) from error

    def digest(self) -> str:
        """Return a text that is equal on ranks with equal costs; of a function, at some samples."""
        probes = np.linspace(0, self._length - 1, min(_PROBES, self._length)).astype(np.int64)
        costs = self._known if self._function is None else self.of(probes)
        return f"costs with the checksum {hashlib.sha256(costs.tobytes()).hexdigest()[:16]}"


def _checked(
    costs: npt.NDArray[np.float64], indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    wrong = ~(np.isfinite(costs) & (costs > 0))
    if wrong.any():
        first = int(np.argmax(wrong))
        raise ConfigError(
            f"cost_fn gives {costs[first]} for sample {indices[first]}; a cost must be a positive, "
            "finite number, such as the number of tokens (an empty text still costs something: 1)"
        )
    return costs
