"""Array types for shares, times and whole fleets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Which = IntArray | slice
"""Ranks of some workers, or a slice for all of them."""

Shares = tuple[int, ...]
"""Samples of each worker in one step, in rank order."""
