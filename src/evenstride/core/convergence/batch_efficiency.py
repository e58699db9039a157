"""The value of a sample at a global batch, and how the learning rate follows the batch.

The noise scale ``phi`` is the batch at which a gradient's noise equals its size. Training takes
``e_min (1 + B / phi)`` epochs. So a sample at ``B`` is worth ``(phi + B0) / (phi + B)`` of one at
``B0``: the *efficiency*. Samples per second times efficiency is the *goodput*.

Source:
    Qiao et al., "Pollux", OSDI 2021, section 3 (goodput), and Johnson et al., "AdaScale SGD", ICML
    2020, section 3 (the gain); the square root rule: Krizhevsky, arXiv 1404.5997, section 5, and
    for Adam Malladi et al., NeurIPS 2022. Taken from others' code, not verified in the papers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, sqrt

Rule = Callable[[float, float, float], float]
"""From (learning rate, base batch, batch) to the learning rate at the batch."""


def efficiency(phi: float, base: float, batch: float) -> float:
    """Return the value of a sample at a batch, in samples at the base batch.

    Args:
        phi: noise scale in samples, at least 0; may be infinite.
        base: ``B0`` in samples, above 0.
        batch: ``B`` in samples, above 0.

    >>> efficiency(phi=1000.0, base=100, batch=1100)
    0.5238095238095238
    """
    _check(phi, base, batch)
    # Infinity over infinity is NaN.
    return 1.0 if phi == inf else (phi + base) / (phi + batch)


def goodput(per_s: float, phi: float, base: float, batch: float) -> float:
    """Return samples per second, weighted by their value at the base batch.

    Args:
        per_s: samples per second at ``batch``.
        phi: noise scale in samples.
        base: ``B0`` in samples.
        batch: ``B`` in samples.
    """
    return per_s * efficiency(phi, base, batch)


def linear(rate: float, base: float, batch: float) -> float:
    """Return the learning rate proportional to the batch; for SGD below the noise scale."""
    _check(0.0, base, batch)
    return rate * batch / base


def square_root(rate: float, base: float, batch: float) -> float:
    """Return the learning rate proportional to the square root of the batch; for Adam."""
    _check(0.0, base, batch)
    return rate * sqrt(batch / base)


def adascale(rate: float, base: float, batch: float, phi: float) -> float:
    """Return the learning rate by AdaScale's gain: linear with pure noise, constant without noise.

    The gain is the progress of a step at ``batch`` relative to one at ``base``: ``batch / base``
    times the efficiency.

    Args:
        rate: at the base batch.
        base: ``B0`` in samples.
        batch: ``B`` in samples.
        phi: noise scale in samples.

    >>> adascale(0.1, 100, 400, phi=0.0), adascale(0.1, 100, 400, phi=inf)
    (0.1, 0.4)
    """
    return rate * batch / base * efficiency(phi, base, batch)


def _check(phi: float, base: float, batch: float) -> None:
    if phi < 0 or base <= 0 or batch <= 0:
        raise ValueError(
            f"invalid noise scale {phi}, base batch {base} or batch {batch}: the noise scale must "
            "be at least 0, the batches above 0 samples"
        )
