"""What a sample is worth at a global batch, and how the learning rate follows the batch.

At the noise scale ``phi`` (samples at which a gradient is as noisy as it is large), training takes
``e_min (1 + B / phi)`` epochs. So a sample at ``B`` is worth ``(phi + B0) / (phi + B)`` of one at
``B0``: the *efficiency*. Samples per second times efficiency is the *goodput*.

Source:
    Qiao et al., "Pollux", OSDI 2021, section 3 (goodput), and Johnson et al., "AdaScale SGD", ICML
    2020, section 3 (the gain); the square root rule: Krizhevsky, arXiv 1404.5997, section 5, and
    for Adam Malladi et al., NeurIPS 2022. Known from the code of others, not verified in print.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, sqrt

Rule = Callable[[float, float, float], float]
"""From (learning rate, base batch, batch) to the learning rate at the batch."""


def efficiency(phi: float, base: float, batch: float) -> float:
    """Return what a sample at a batch is worth, in samples at the base batch.

    Args:
        phi: noise scale in samples, at least 0; may be infinite.
        base: ``B0`` in samples, above 0.
        batch: ``B`` in samples, above 0.

    >>> efficiency(phi=1000.0, base=100, batch=1100)
    0.5238095238095238
    """
    _check(phi, base, batch)
    # Infinity over infinity is no number.
    return 1.0 if phi == inf else (phi + base) / (phi + batch)


def goodput(per_s: float, phi: float, base: float, batch: float) -> float:
    """Return samples per second, counted by what they are worth at the base batch.

    Args:
        per_s: samples per second at ``batch``.
        phi: noise scale in samples.
        base: ``B0`` in samples.
        batch: ``B`` in samples.
    """
    return per_s * efficiency(phi, base, batch)


def linear(rate: float, base: float, batch: float) -> float:
    """Return the learning rate in proportion to the batch; for SGD below the noise scale."""
    _check(0.0, base, batch)
    return rate * batch / base


def square_root(rate: float, base: float, batch: float) -> float:
    """Return the learning rate in proportion to the batch's square root; for Adam and its kin."""
    _check(0.0, base, batch)
    return rate * sqrt(batch / base)


def adascale(rate: float, base: float, batch: float, phi: float) -> float:
    """Return the learning rate by AdaScale's gain: linear in noise, constant without any.

    The gain is by how much more a step at ``batch`` does than one at ``base``: ``batch / base``
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
            f"a noise scale of {phi}, a base of {base} and a batch of {batch} samples: the first "
            "must be at least 0, the others above 0"
        )
