"""Predictors that only remember: the last speed, and a moving average."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Last:
    """The next step is as fast as the last one; the state is its speed, ``(W,)``."""

    def start(self, workers: int) -> FloatArray:
        return np.full(workers, np.nan)

    def learn(
        self, state: FloatArray, worker: IntArray, speed: FloatArray, loads: FloatArray
    ) -> FloatArray:
        del loads
        latest = state.copy()
        latest[worker] = speed
        return latest

    def predict(self, state: FloatArray, loads: FloatArray) -> FloatArray:
        del loads
        return state


@dataclass(frozen=True, slots=True)
class MovingAverage:
    """Exponential moving average of the speeds; the state is the average, ``(W,)``."""

    smoothing: float = 0.3  # weight of the newest speed, above 0 and at most 1

    def __post_init__(self) -> None:
        if not 0 < self.smoothing <= 1:
            raise ConfigError(
                f"predictor ema: smoothing is {self.smoothing}; it must be above 0 and at most 1"
            )

    def start(self, workers: int) -> FloatArray:
        return np.full(workers, np.nan)

    def learn(
        self, state: FloatArray, worker: IntArray, speed: FloatArray, loads: FloatArray
    ) -> FloatArray:
        del loads
        average, before = state.copy(), state[worker]
        # The first speed is the average; nan would stay nan.
        known = np.where(np.isnan(before), speed, before)
        average[worker] = known + self.smoothing * (speed - known)
        return average

    def predict(self, state: FloatArray, loads: FloatArray) -> FloatArray:
        del loads
        return state
