"""All decisions: pure functions over frozen data, with no torch, clock or randomness.

Start with `control.advance`, which is the whole decision path. May import numpy and `errors` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstride._importing import later

if TYPE_CHECKING:
    from evenstride.core.fleet import Fleet, Worker
    from evenstride.core.policy import Keep, Move, Policy, Situation

__all__ = ["Fleet", "Keep", "Move", "Policy", "Situation", "Worker"]

__getattr__ = later(
    __name__, {"fleet": ("Fleet", "Worker"), "policy": ("Keep", "Move", "Policy", "Situation")}
)
