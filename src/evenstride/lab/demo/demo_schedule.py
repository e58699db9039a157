"""What one demo does, as its workers are told, and what they bring home."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPORT = "report.json"
NEWS = "news.jsonl"
TRACE = "adaptive.jsonl"


@dataclass(frozen=True, slots=True)
class DemoSchedule:
    """The schedule of a demo."""

    folder: Path  # the run's folder, for traces and the result
    data: Path | None  # folder of Fashion-MNIST; ``None`` for the digits
    block_steps: int = 40  # steps per block
    step_s: float = 0.15  # wanted time of a balanced step; many periods of the limits
    size_s: float = 1.5  # seconds of measuring per batch size in a calibration

    def save(self, path: Path) -> None:
        plain = {**asdict(self), "folder": str(self.folder), "data": str(self.data or "")}
        path.write_text(json.dumps(plain))

    @classmethod
    def load(cls, path: Path) -> DemoSchedule:
        plain = json.loads(path.read_text())
        data = plain.pop("data")
        folder = Path(plain.pop("folder"))
        return cls(folder=folder, data=Path(data) if data else None, **plain)


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
class Report:
    """What all ranks bring home, in rank order, and what they measured together."""

    global_batch: int  # samples per step
    communication_s: float  # time of averaging the gradients
    train_samples: int  # samples in the training set
    changes: int  # changes of the adaptive split
    ranks: list[RankReport]  # each rank's own report

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Report:
        plain = json.loads(path.read_text())
        ranks = [_rank_report(mine) for mine in plain.pop("ranks")]
        return cls(ranks=ranks, **plain)


def _rank_report(plain: dict[str, Any]) -> RankReport:
    blocks = [Block(**{**block, "shares": tuple(block["shares"])}) for block in plain["blocks"]]
    before, after = (
        {int(size): time_s for size, time_s in plain[name].items()} for name in ("before", "after")
    )
    return RankReport(before, after, blocks, plain["accuracy"])
