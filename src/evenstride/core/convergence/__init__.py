"""How many epochs a training takes at a global batch, and what a sample is worth there.

Start with `batch_efficiency`. Imports only the bottom of `core`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstride._importing import later

if TYPE_CHECKING:
    from evenstride.core.convergence.batch_efficiency import (
        adascale,
        efficiency,
        goodput,
        linear,
        square_root,
    )

__all__ = ["adascale", "efficiency", "goodput", "linear", "square_root"]

__getattr__ = later(
    __name__,
    {
        "batch_efficiency": ("adascale", "efficiency", "goodput", "linear", "square_root"),
    },
)
