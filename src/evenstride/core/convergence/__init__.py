"""How many epochs training takes at a global batch, and what a sample is worth there.

Start with `batch_efficiency`. Imports low-level modules of `core`, and `core.gradients`.
"""

from __future__ import annotations

from evenstride.core.convergence.batch_efficiency import (
    adascale,
    efficiency,
    goodput,
    linear,
    square_root,
)

__all__ = ["adascale", "efficiency", "goodput", "linear", "square_root"]
