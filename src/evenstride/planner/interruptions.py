"""What losing machines costs a run: by how much it gets longer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.fleet import FloatArray


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a run does about losses.

    Args:
        save_s: that a checkpoint takes, above 0.
        restart_s: from a loss until all train again, the search for another machine included.
    """

    save_s: float = 2.0
    restart_s: float = 120.0

    def stretch(self, losses_per_h: FloatArray | float) -> FloatArray:
        """Return by which factor a run gets longer, expected.

        Saves come at the best distance for the rate (to first order), and training goes on with as
        many machines as before once another one is there.

        Args:
            losses_per_h: of all machines together, any shape; 0 costs nothing, not even saves.

        Source:
            Daly 2006, equation for the whole run, with Young's interval of 1974. By then ``core``
            asks for saves itself; here the cost of doing so is expected.
        """
        rate = np.asarray(losses_per_h, dtype=np.float64) / 3600.0
        some = rate > 0
        safe = np.where(some, rate, 1.0)
        work_s = np.sqrt(2.0 * self.save_s / safe)
        lost = np.expm1(np.minimum(safe * (work_s + self.save_s), 700.0)) / (safe * work_s)
        return np.where(some, lost * (1.0 + safe * self.restart_s), 1.0)
