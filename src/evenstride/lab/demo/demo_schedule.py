"""What one demo does, as its workers are told, and what they bring home."""

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


class Filed:
    """A dataclass that is kept in a file of JSON."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=os.fspath))

    @classmethod
    def load(cls, path: Path) -> Self:
        return TypeAdapter(cls).validate_python(json.loads(path.read_text()))


@dataclass(frozen=True, slots=True)
class DemoSchedule(Filed):
    """The schedule of a demo."""

    folder: Path  # the run's folder, for traces and the result
    data: Path | None  # folder of Fashion-MNIST; ``None`` for the digits
    block_steps: int = 40  # steps per block
    step_s: float = 0.15  # wanted time of a balanced step; many periods of the limits
    size_s: float = 1.5  # seconds of measuring per batch size in a calibration


@dataclass(slots=True)
class Block:
    """Consecutive steps of one arm."""

    policy: str  # of the arm
    # Wall time of each step after the first, as the leader saw it.
    step_s: list[float] = field(default_factory=list)
    # Per step, the sum of this rank's sample losses.
    losses: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # per step, this rank's samples
    # Per step, this rank's sample ids with the epoch they were delivered in.
    ids: list[tuple[int, list[int]]] = field(default_factory=list)
    shares: tuple[int, ...] = ()  # of all ranks in the last step


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank brings home."""

    before: dict[int, float]  # its curve, calibrated before the blocks
    after: dict[int, float]  # the same after them
    blocks: list[Block]  # in the order they were run
    accuracy: dict[str, float]  # test accuracy by policy (the same on all ranks)


@dataclass(frozen=True, slots=True)
class Report(Filed):
    """What all ranks bring home, in rank order, and what they measured together."""

    global_batch: int  # samples per step
    communication_s: float  # time of averaging the gradients
    train_samples: int  # samples in the training set
    changes: int  # changes of the adaptive split
    ranks: list[RankReport]  # each rank's own report
