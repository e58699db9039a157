"""From measured step times to a believed time curve for every worker.

Start with `estimates`, which has the curves and all that is believed of them. `kalman` learns it
from what was measured (`observation`), and `change_detection` tells it what is news.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstride._importing import later

if TYPE_CHECKING:
    from evenstride.core.time_model.estimates import TimeModel

__all__ = ["TimeModel"]

__getattr__ = later(__name__, {"estimates": __all__})
