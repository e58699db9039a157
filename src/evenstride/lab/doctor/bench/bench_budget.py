"""How long each part of a bench takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchBudget:
    """What a bench may take.

    Args:
        timing_s: how long own work is measured.
        balance_s: how long the equal and the adaptive split are run in turns.
        overhead_s: how long plain training and evenstride are run in turns.
        step_s: what an equal split's step should take.
        block_s: what a stretch of steps of one kind should take.
        group_timeout_s: after which a rank that waits for another gives up.
        deadline_s: after which the process ends itself, whatever it hangs in.
    """

    timing_s: float = 15.0
    balance_s: float = 35.0
    overhead_s: float = 40.0
    step_s: float = 0.03
    block_s: float = 0.6
    group_timeout_s: float = 60.0
    deadline_s: float = 360.0

    @classmethod
    def of(cls, seconds: float) -> BenchBudget:
        """Return the plan whose measurements take about ``seconds`` in all.

        Blocks, and at last steps, are shorter in a short plan, so that there are several.
        """
        usual = cls()
        part = seconds / (usual.timing_s + usual.balance_s + usual.overhead_s)
        return cls(
            timing_s=usual.timing_s * part,
            balance_s=usual.balance_s * part,
            overhead_s=usual.overhead_s * part,
            step_s=usual.step_s * min(max(3.0 * part, 0.1), 1.0),
            block_s=usual.block_s * min(part, 1.0),
            deadline_s=180.0 + 2.0 * seconds,
        )

    @property
    def block_steps(self) -> int:
        """Steps of a block."""
        return max(4, round(self.block_s / self.step_s))
