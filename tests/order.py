"""The sample order of a whole epoch, which only tests need."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenstride.core.sampling.permutation import Permutation


def epoch_order(seed: int, epoch: int, length: int, *, shuffle: bool) -> npt.NDArray[np.int64]:
    """Return the indices of the data set in the order of an epoch."""
    positions = np.arange(length, dtype=np.int64)
    return Permutation(length, seed, epoch).at(positions) if shuffle else positions
