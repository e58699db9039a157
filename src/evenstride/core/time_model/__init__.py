"""From measured step times to a believed time curve for every worker.

Start with `kalman`, the estimate; `change_detection` tells it what is news. `step_times` has the
curves themselves, and `observation` what was measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstride._importing import later

if TYPE_CHECKING:
    from evenstride.core.time_model.step_times import TimeModel

__all__ = ["TimeModel"]

__getattr__ = later(
    __name__,
    {
        "step_times": ("TimeModel",),
    },
)
