"""The order of an epoch as a whole, which only tests need."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenstride.core.sampling.permutation import Permutation


def epoch_order(seed: int, epoch: int, length: int, *, shuffle: bool) -> npt.NDArray[np.int64]:
    """Return the data set's indices in the order in which an epoch trains them."""
    positions = np.arange(length, dtype=np.int64)
    return Permutation(length, seed, epoch).at(positions) if shuffle else positions
