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
    """The schedule of a demo.

    Args:
        folder: the run's folder, for traces and the result.
        data: folder of Fashion-MNIST; ``None`` for the digits.
        block_steps: steps per block.
        step_s: wanted time of a balanced step; many periods of the limits.
        size_s: seconds of measuring per batch size in a calibration.
    """

    folder: Path
    data: Path | None
    block_steps: int = 40
    step_s: float = 0.15
    size_s: float = 1.5

    def save(self, path: Path) -> None:
        """Write the plan."""
        plain = {**asdict(self), "folder": str(self.folder), "data": str(self.data or "")}
        path.write_text(json.dumps(plain))

    @classmethod
    def load(cls, path: Path) -> DemoSchedule:
        """Read the plan."""
        plain = json.loads(path.read_text())
        data = plain.pop("data")
        folder = Path(plain.pop("folder"))
        return cls(folder=folder, data=Path(data) if data else None, **plain)


@dataclass(slots=True)
class Block:
    """Consecutive steps of one arm.

    Args:
        policy: of the arm.
        step_s: wall time of each step after the first, as the leader saw it.
        losses: per step, the sum of this rank's sample losses.
        counts: per step, this rank's samples.
        ids: per step, this rank's sample ids with the epoch they were delivered in.
        shares: of all ranks in the last step.
    """

    policy: str
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[tuple[int, list[int]]] = field(default_factory=list)
    shares: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank brings home.

    Args:
        before: its curve, calibrated before the blocks.
        after: the same after them.
        blocks: in the order they were run.
        accuracy: test accuracy by policy (the same on all ranks).
    """

    before: dict[int, float]
    after: dict[int, float]
    blocks: list[Block]
    accuracy: dict[str, float]


@dataclass(frozen=True, slots=True)
class Report:
    """What all ranks bring home, in rank order, and what they measured together.

    Args:
        global_batch: samples per step.
        communication_s: time of averaging the gradients.
        train_samples: samples in the training set.
        changes: changes of the adaptive split.
        ranks: each rank's own report.
    """

    global_batch: int
    communication_s: float
    train_samples: int
    changes: int
    ranks: list[RankReport]

    def save(self, path: Path) -> None:
        """Write the report."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read the report."""
        plain = json.loads(path.read_text())
        ranks = [_rank_report(mine) for mine in plain.pop("ranks")]
        return cls(ranks=ranks, **plain)


def _rank_report(plain: dict[str, Any]) -> RankReport:
    blocks = [Block(**{**block, "shares": tuple(block["shares"])}) for block in plain["blocks"]]
    before, after = (
        {int(size): time_s for size, time_s in plain[name].items()} for name in ("before", "after")
    )
    return RankReport(before, after, blocks, plain["accuracy"])
