"""Split a global batch over workers: by speed, within memory, in whole micro-batches.

Start with `integer_splits`, the exact integer split. Imports `time_model` and low-level modules of
`core`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstride._importing import later

if TYPE_CHECKING:
    from evenstride.core.allocation.speedup import (
        Prospect,
        linear_bound,
        prospect,
        prospect_of_speeds,
    )

__all__ = ["Prospect", "linear_bound", "prospect", "prospect_of_speeds"]

__getattr__ = later(__name__, {"speedup": __all__})
