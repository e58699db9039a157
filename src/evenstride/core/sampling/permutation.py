"""An epoch's order with random access: any position's sample, without the order before it.

A permutation kept as an array takes 8 bytes per sample, and all of it is drawn before the first
sample is known. Here the sample at a position is computed from (length, seed, epoch) alone, so
place, resume and memory cost the same for a thousand samples as for a billion.

*Long data sets: a Feistel network.* A position is written as two digits, ``high * b + low`` with
``high`` below ``a`` and ``low`` below ``b``, both about the root of the length. Each round
replaces one digit by ``F(other digit) - digit`` modulo its size, the next round the other one.
Whatever ``F`` is, a round undoes itself; so the network is a bijection, and its inverse is the same
rounds from the last to the first. ``F`` is the output of SplitMix64, as far into its sequence as
the other digit says, from a state of the round's own. 63 of its bits count, so that no remainder
is favoured by more than one part in ``2**31``.

*Out of range: walk on.* The digits can name ``a * b`` numbers, a few more than there are samples.
What leaves the range goes through the network again until it is back, which is a bijection of the
range. On average the network runs less than ``1 + a / length`` times: 1.034 at the shortest length,
1.00004 at a billion; and for no position more than ``a`` times.

*Ten rounds.* How much few rounds show was measured over 600 to 3,000 seeds, by collisions of digits
and of differences and by the parity. Just told from a uniform permutation are six rounds at lengths
of 64 and 144, five at 1,025 and four at 4,097; eight are nowhere. Patarin advises more than six
where many permutations of few numbers are made. The size ``a`` is even: with two odd sizes the
parity of a round is fixed, and where the length is ``a * b`` all orders would have the same.

*Short data sets: sorting.* At a length of eight not even ten rounds look uniform. Up to 1,024
samples the whole order is made, by sorting the indices by 54 random bits each. It is uniform but
for the chance of equal bits, under ``2**-34``; among those the smaller index comes first.

None of this is meant to withstand someone who looks for the seed. The numbers come from SplitMix64
on arrays, which gives the same ones on every machine: its state is counted up by the golden ratio,
and an output is the state mixed, so any output can be had at once.

Source:
    Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014,
    doi:10.1145/2660193.2660195.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np
import numpy.typing as npt

from evenstride.core.arrays import IntArray
from evenstride.errors import ConfigError

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
    """Turn each state into its output, in place; ``spare`` is another array of that shape."""
    for shift, factor in _MIXING:
        np.right_shift(z, shift, spare)
        np.bitwise_xor(z, spare, z)
        np.multiply(z, factor, z)
    np.right_shift(z, _LAST_SHIFT, spare)
    np.bitwise_xor(z, spare, z)


def outputs(state: np.uint64, count: int) -> UintArray:
    """Return the first outputs after a state, ``(count,)``."""
    z = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN + state
    mix(z, np.empty_like(z))
    return z


MAX_LENGTH = 2**63 - 1
"""The longest data set: its indices are 64-bit integers with a sign."""

SORTED_LENGTH = 1024
"""Up to this many samples the order is sorted as a whole."""

ROUNDS = 10

_Round = tuple[int, UintArray]
"""Which digit a round changes, 0 for the high one, and its key."""

_CHUNK = 4096  # the five arrays a network works on then stay in a processor's cache
_WORD = 2**64
_TOP_BIT = constant(2**63)


@dataclass(frozen=True, slots=True)
class Permutation:
    """A random order of ``range(length)`` that can be read at any position.

    The order is a function of the three arguments, by integer arithmetic of its own: it is the
    same on every machine and under every version of numpy. Orders of other seeds, epochs or
    lengths have nothing to do with it. `ConfigError` if there is no such data set or epoch.

    Cost:
        For ``n`` positions ``O(n)`` time and, beside the result, under 0.5 MB, whatever the length;
        some 0.1 microseconds each in thousands, 2 in a batch of 64 (``benchmarks/shuffle.py``).

    Source:
        A Feistel network on two digits of different size, with additions, is the numeric
        alternating network of Hoang & Rogaway, "On Generalized Feistel Networks", CRYPTO 2010,
        doi:10.1007/978-3-642-14623-7_33; walking on until the range is reached again is from
        Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002,
        doi:10.1007/3-540-45760-7_9. We subtract the digit where they add to it, so that one
        function serves both directions, and sort where the domain is small. The number of rounds
        heeds Patarin, "Generic Attacks on Feistel Schemes", ASIACRYPT 2001,
        doi:10.1007/3-540-45682-1_14.

    >>> order = Permutation(length=10**12, seed=1, epoch=0)
    >>> order.at(np.array([0, 1, 999_999_999_999]))
    array([565076073802, 537409929754, 579697651343])
    >>> order.position_of(order.at(np.array([7, 5, 7])))
    array([7, 5, 7])
    """

    length: int  # samples in the data set, 1 to `MAX_LENGTH`
    seed: int  # any integer, of which the lowest 64 bits count (as two's complement)
    epoch: int  # 0 or more; as with the seed, the lowest 64 bits count

    def __post_init__(self) -> None:
        if not 1 <= self.length <= MAX_LENGTH:
            raise ConfigError(
                f"a shuffle of {self.length} samples was asked for; possible are 1 to "
                f"{MAX_LENGTH}; give the number of samples in the data set"
            )
        if self.epoch < 0:
            raise ConfigError(
                f"the order of epoch {self.epoch} was asked for; epochs count from 0; "
                "give an epoch of 0 or more"
            )

    @property
    def sides(self) -> tuple[int, int]:
        """Sizes of the two digits, the high one's even; their product is below length + high."""
        high = isqrt(self.length - 1) + 1
        high += high % 2
        return high, -(-self.length // high)

    def at(self, positions: IntArray) -> IntArray:
        """Return the samples at some positions of the epoch, ``(n,)`` indices into the data set.

        Positions are integers of 0 to ``length - 1``, in any order, repeated or not; `ConfigError`
        for anything else.
        """
        self._check(positions, "position")
        if self.length <= SORTED_LENGTH:
            return _sorted_order(self.length, self._state())[positions]
        return self._walked(positions, _rounds(self._state()))

    def position_of(self, indices: IntArray) -> IntArray:
        """Return the positions at which samples come: the inverse of `at`, at the same cost."""
        self._check(indices, "index")
        if self.length <= SORTED_LENGTH:
            order = _sorted_order(self.length, self._state())
            return np.argsort(order)[indices].astype(np.int64, copy=False)
        return self._walked(indices, _rounds(self._state())[::-1])

    def _state(self) -> np.uint64:
        return _state(self.length, self.seed, self.epoch)

    def _check(self, numbers: IntArray, what: str) -> None:
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise ConfigError(
                f"{numbers.ndim}-dimensional {numbers.dtype} was given where each {what} is asked "
                "for; possible is a one-dimensional array of integers; convert it to one"
            )
        if not numbers.size:
            return
        least, most = int(numbers.min()), int(numbers.max())
        if least < 0 or most >= self.length:
            raise ConfigError(
                f"{what} {least if least < 0 else most} was asked for; {self.length} samples have "
                f"0 to {self.length - 1}; ask for one of these, or give the data set's true length"
            )

    def _walked(self, numbers: IntArray, rounds: Sequence[_Round]) -> IntArray:
        """Return where the numbers come back into range, on their way through the network."""
        found = np.empty(len(numbers), dtype=np.int64)
        sides, length = self.sides, np.uint64(self.length)
        for start in range(0, len(numbers), _CHUNK):
            image = _network(numbers[start : start + _CHUNK].astype(np.uint64), sides, rounds)
            outside = np.flatnonzero(image >= length)
            while outside.size:
                image[outside] = again = _network(image[outside], sides, rounds)
                outside = outside[again >= length]
            found[start : start + _CHUNK] = image
        return found


def _network(numbers: UintArray, sides: tuple[int, int], rounds: Sequence[_Round]) -> UintArray:
    """Return the images of numbers below the product of the sides."""
    sizes = constant(sides[0]), constant(sides[1])
    high = numbers // sizes[1]
    digits = high, numbers - high * sizes[1]
    mixed, spare = np.empty_like(numbers), np.empty_like(numbers)
    for which, key in rounds:
        digit, size = digits[which], sizes[which]
        np.multiply(digits[1 - which], GOLDEN, mixed)
        np.add(mixed, key, mixed)
        mix(mixed, spare)
        np.bitwise_or(mixed, _TOP_BIT, mixed)  # never less than the digit
        np.subtract(mixed, digit, mixed)
        # The remainder by way of the quotient, for which numpy has vector instructions.
        np.floor_divide(mixed, size, spare)
        np.multiply(spare, size, spare)
        np.subtract(mixed, spare, digit)
    return digits[0] * sizes[1] + digits[1]


@lru_cache(maxsize=16)
def _state(length: int, seed: int, epoch: int) -> np.uint64:
    """Return the state that all of an order comes from: the three numbers, mixed in turn."""
    state = np.uint64(0)
    for number in (seed, epoch, length):
        state = outputs(state ^ np.uint64(int(number) % _WORD), 1)[0]
    return state


@lru_cache(maxsize=16)
def _rounds(state: np.uint64) -> tuple[_Round, ...]:
    keys = outputs(state, ROUNDS).tolist()
    return tuple((number % 2, constant(key)) for number, key in enumerate(keys))


@lru_cache(maxsize=4)
def _sorted_order(length: int, state: np.uint64) -> IntArray:
    """Return a whole order; the random bits carry their index, so that no two are equal."""
    low = np.uint64(SORTED_LENGTH - 1)
    tagged = (outputs(state, length) & ~low) | np.arange(length, dtype=np.uint64)
    order = (np.sort(tagged) & low).astype(np.int64)
    # It is kept for the next call.
    order.flags.writeable = False
    return order
