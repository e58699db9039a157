"""What is missing in what is shown of a run, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from evenstride.report.run.believed import number_of
from evenstride.report.run.generation import Generation
from evenstride.report.words import plain


@dataclass(slots=True)
class Gaps:
    """What was left out of a run while it was read.

    Args:
        damaged: records and reports that cannot be.
        unsound: reports of times or samples that cannot be.
        not_replayed: why the control does not follow any more; empty while it does.
    """

    damaged: int = 0
    unsound: int = 0
    not_replayed: str = ""

    def lose_control(self, error: BaseException) -> None:
        """Note that what was decided cannot be followed.

        Args:
            error: for which it cannot; its text may hold others' names.
        """
        self.not_replayed = (
            "what was decided cannot be replayed by this version, so figures from fitted curves "
            f"are missing ({type(error).__name__}: {plain(error, 80)})"
        )

    def sentences(self) -> Iterator[str]:
        """Yield a sentence for each kind of what is missing."""
        if self.damaged:
            yield (
                f"{self.damaged} record(s) were damaged, and left out; sums lack their steps, and "
                "what is said of other splits may be off"
            )
        if self.unsound:
            yield (
                f"{self.unsound} report(s) of impossible times or samples were left out; their "
                "steps count in no comparison"
            )
        if self.not_replayed:
            yield self.not_replayed


def untold(generation: Generation | None, summary: dict[str, Any] | None) -> str:
    """Return in a sentence how many steps a process took beyond those that it told of.

    Args:
        generation: the latest of it.
        summary: that it ended with.
    """
    steps = number_of((summary or {}).get("step"))
    if generation is None or steps is None or not generation.lockstep or generation.not_measured:
        return ""
    left_out = int(steps) - generation.first - generation.steps
    if left_out <= 0:
        return ""
    return f"the last {left_out} step(s) came after the last exchange, and count in no figure"
