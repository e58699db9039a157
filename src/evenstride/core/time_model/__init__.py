"""From measured step times to an estimated time curve for every worker.

Start with `estimates`, which has the curves and their uncertainty. `kalman` learns them from
measurements (`observation`), and `change_detection` finds changes of speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstride._importing import later

if TYPE_CHECKING:
    from evenstride.core.time_model.estimates import TimeModel

__all__ = ["TimeModel"]

__getattr__ = later(__name__, {"estimates": __all__})
