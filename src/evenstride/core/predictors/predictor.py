"""The seam that every way of predicting the workers' speeds fits into."""

from __future__ import annotations

from typing import Protocol, TypeVar

from evenstride.core.arrays import FloatArray, IntArray

StateT = TypeVar("StateT")


class Predictor(Protocol[StateT]):
    """Says how many samples per second each of ``W`` workers will process in its next step.

    Implementations hold settings only and never mutate; whatever they learn is in the state,
    which has to be picklable. The loads given to `learn` must have been known at the same
    moment, relative to the step, as those given to `predict`.
    """

    def start(self, workers: int) -> StateT:
        """Return the state in which nothing is known."""
        ...

    def learn(
        self, state: StateT, worker: IntArray, speed: FloatArray, loads: FloatArray
    ) -> StateT:
        """Return the state after one step of some workers.

        Args:
            state: before it.
            worker: their ranks, each at most once, ``(n,)``.
            speed: their samples per second in that step, finite and above 0, ``(n,)``.
            loads: processor and memory load of their machines, from 0 to 1, as known before
                the step; not a number where unknown, ``(2, n)``.
        """
        ...

    def predict(self, state: StateT, loads: FloatArray) -> FloatArray:
        """Return the speed of every worker's next step, nan for those never seen, ``(W,)``.

        Args:
            state: after all that was told.
            loads: as they are known now, ``(2, W)``.
        """
        ...
