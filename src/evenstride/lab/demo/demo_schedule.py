"""The schedule of a demo, which its workers read, and the report that they return."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import TypeAdapter

REPORT = "report.json"
NEWS = "news.jsonl"
TRACE = "adaptive.jsonl"
EQUAL_TRACE = "uniform.jsonl"


class Filed:
    """A dataclass that is stored as a JSON file."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=os.fspath))

    @classmethod
    def load(cls, path: Path) -> Self:
        return TypeAdapter(cls).validate_python(json.loads(path.read_text()))


@dataclass(frozen=True, slots=True)
class DemoSchedule(Filed):
    """The schedule of a demo."""

    folder: Path  # for traces and the report
    data: Path | None  # folder of Fashion-MNIST; ``None`` for the digits
    rounds: int = 10  # each policy trains one block per round
    block_steps: int = 8  # steps of a block in a round
    # Steps of ``uniform`` and ``adaptive`` before the first round.
    cold_steps: int = 24
    step_s: float = 0.15  # target time of a balanced step: many periods of the CPU limits
    size_s: float = 1.0  # seconds per batch size in the calibration


@dataclass(slots=True)
class Block:
    """Consecutive steps of one arm, as one rank measured them.

    The first step of a block, and of an epoch, has no time.
    """

    policy: str  # of the arm
    step_s: list[float] = field(default_factory=list)  # wall time of each timed step
    # Share and busy time in seconds of each timed step.
    work: list[tuple[int, float]] = field(default_factory=list)
    # Sum of the sample losses of each step.
    losses: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # samples of each step
    # Epoch and sample ids of each step.
    ids: list[tuple[int, list[int]]] = field(default_factory=list)
    shares: tuple[int, ...] = ()  # of all ranks in the last step
    cold: bool = False  # whether the block comes before the first round


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of one rank."""

    before: dict[int, float]  # its time curve, calibrated before the blocks
    blocks: list[Block]  # in the order they ran
    accuracy: dict[str, float]  # test accuracy by policy, the same on all ranks


@dataclass(frozen=True, slots=True)
class Report(Filed):
    """The reports of all ranks."""

    global_batch: int  # samples per step
    train_samples: int  # samples of an epoch
    changes: int  # changes of the adaptive split
    ranks: list[RankReport]  # in rank order
