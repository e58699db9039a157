"""What virtual workers report: their steps as the columns of `Measured`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.observation import Measured


class Notes:
    """Keeps the steps of ``W`` workers until the leader asks for them."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._steps: list[int] = []
        self._shares: list[IntArray] = []
        self._busy_s: list[FloatArray] = []
        self._wait_s: list[FloatArray] = []

    def add(self, step: int, shares: IntArray, busy_s: FloatArray, wait_s: FloatArray) -> None:
        """Keep one step; all arrays have shape ``(W,)``."""
        self._steps.append(step)
        self._shares.append(shares)
        self._busy_s.append(busy_s)
        self._wait_s.append(wait_s)

    def take(
        self, breaks: list[npt.NDArray[np.bool_]], cpu_load: FloatArray | None = None
    ) -> Measured:
        """Return all steps as observations, and forget them.

        Args:
            breaks: for each of the latest steps, for which workers it begins an observation.
            cpu_load: of each worker's machine by now, ``(W,)``; not known if left out.
        """
        shares, busy_s = np.array(self._shares).T, np.array(self._busy_s).T  # (W, steps)
        workers, steps = shares.shape
        begins = np.zeros_like(shares, dtype=np.bool_)
        begins[:, 0] = True
        begins[:, 1:] = shares[:, 1:] != shares[:, :-1]
        known = breaks[-steps:]
        if known:
            begins[:, steps - len(known) :] |= np.array(known).T
        first = np.flatnonzero(begins)
        loads = np.full((2, len(first)), np.nan)
        if cpu_load is not None:
            loads[0] = cpu_load[first // steps]
        measured = Measured(
            worker=first // steps,
            share=shares.ravel()[first],
            first_step=np.array(self._steps)[first % steps],
            steps=np.diff(np.append(first, workers * steps)),
            busy_s=busy_s.ravel(),
            wait_s=np.array(self._wait_s).T.ravel(),
            loads=loads,
        )
        self._steps, self._shares, self._busy_s, self._wait_s = [], [], [], []
        return measured
