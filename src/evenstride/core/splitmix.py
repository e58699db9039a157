"""SplitMix64 on arrays: well mixed 64-bit numbers out of plain ones, the same on every machine.

Its state is counted up by the golden ratio, and an output is the state mixed. So any output can be
had at once, and numbers that are close together have outputs that have nothing in common.

Source:
    Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014,
    doi:10.1145/2660193.2660195.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UintArray = npt.NDArray[np.uint64]


def constant(value: int) -> UintArray:
    """Return a read-only array of no dimension, which numpy takes a third faster than a scalar."""
    made = np.array(value, dtype=np.uint64)
    made.flags.writeable = False
    return made


GOLDEN = constant(0x9E3779B97F4A7C15)
"""What the state grows by from one output to the next, modulo ``2**64``."""

_MIXING = (
    (constant(30), constant(0xBF58476D1CE4E5B9)),
    (constant(27), constant(0x94D049BB133111EB)),
)
_LAST_SHIFT = constant(31)


def mix(z: UintArray, spare: UintArray) -> None:
    """Turn each state into its output, in place.

    Args:
        z: states, of any shape with at least one dimension.
        spare: another array of that shape, to work in.
    """
    for shift, factor in _MIXING:
        np.right_shift(z, shift, spare)
        np.bitwise_xor(z, spare, z)
        np.multiply(z, factor, z)
    np.right_shift(z, _LAST_SHIFT, spare)
    np.bitwise_xor(z, spare, z)


def outputs(state: np.uint64, count: int) -> UintArray:
    """Return the first ``count`` outputs after a state, ``(count,)``."""
    z = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN + state
    mix(z, np.empty_like(z))
    return z
