"""A demo's report made of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evenstride.core.fleet import Shares
from evenstride.lab.demo.demo_schedule import Block, RankReport, Report

# Two workers, the second half as fast; three samples in a step, four in the data set.
FAST, SLOW = {1: 0.01, 2: 0.02}, {1: 0.02, 2: 0.04}
SAMPLES = 4


def block(
    policy: str,
    step_s: Sequence[float],
    shares: Shares,
    ids: Sequence[tuple[int, list[int]]] = (),
    loss: float = 1.0,
    steps: int = 40,
) -> Block:
    """Return one rank's block whose every step has one sample of the given loss."""
    return Block(policy, list(step_s), [loss] * steps, [1] * steps, list(ids), shares)


def report(first: list[Block], second: list[Block], **values: object) -> Report:
    """Return what two ranks with these blocks bring home."""
    accuracy = {"uniform": 0.9, "adaptive": 0.91}
    ranks = [
        RankReport(FAST, FAST, first, accuracy),
        RankReport(SLOW, SLOW, second, accuracy),
    ]
    whole = Report(3, 0.0, SAMPLES, 2, ranks)
    return replace(whole, **values)  # type: ignore[arg-type]


def usual() -> list[Block]:
    """Return the blocks that a demo runs, as its leader saw them."""
    return [
        block("adaptive", [9.0, 0.9, 9.0], (2, 1)),
        block("uniform", [0.04, 0.04, 5.0], (1, 2)),
        block("adaptive", [0.025, 0.02], (2, 1)),
        block("static:2,1", [0.021] * 3, (2, 1)),
        block("static:3,0", [0.030] * 3, (3, 0)),
        block("uniform", [0.04], (1, 2)),
        block("adaptive", [0.0235], (2, 1)),
        block("static:2,1", [0.019] * 3, (2, 1)),
    ]
