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
    rank: int = 0,
    cold: bool = False,
) -> Block:
    """Return one rank's block whose every step has one sample of the given loss."""
    share = shares[rank]
    work = [(share, (0.01, 0.02)[rank] * share)] * len(step_s)
    return Block(
        policy, list(step_s), work, [loss] * steps, [1] * steps, list(ids), shares, cold=cold
    )


def report(first: list[Block], second: list[Block], **values: object) -> Report:
    """Return the report of two ranks with these blocks."""
    accuracy = {"uniform": 0.9, "adaptive": 0.91}
    ranks = [RankReport(FAST, first, accuracy), RankReport(SLOW, second, accuracy)]
    whole = Report(6, SAMPLES, 2, ranks)
    return replace(whole, **values)  # type: ignore[arg-type]


EQUAL, BALANCED, OTHER = (3, 3), (4, 2), (5, 1)


def usual(
    rank: int = 0, *, tempo: Sequence[float] = (1.0, 1.0), equal_s: float = 0.06
) -> list[Block]:
    """Return the blocks of a demo of as many rounds as there are in ``tempo``.

    The two workers take 10 and 20 ms per sample. ``tempo`` multiplies all times of a round.
    """
    blocks = [
        block("uniform", [9.0, 0.9, 9.0], EQUAL, rank=rank, cold=True),
        block("adaptive", [9.0, 0.9, 9.0], EQUAL, rank=rank, cold=True),
    ]
    for number, factor in enumerate(tempo):
        some = [
            block("uniform", [factor * equal_s] * 3, EQUAL, rank=rank),
            block("adaptive", [factor * 0.042] * 3, BALANCED, rank=rank),
            block("static:4,2", [factor * 0.04] * 3, BALANCED, rank=rank),
            block("static:5,1", [factor * 0.05] * 3, OTHER, rank=rank),
        ]
        for one in some:
            one.work = [(share, factor * busy_s) for share, busy_s in one.work]
        blocks += reversed(some) if number % 2 else some
    return blocks
