"""Cells of the papers' experiments: what to train, what is stored, and what is still missing.

A *cell* is one training: a job, a cluster, a policy, a synchronisation mode and a seed. The result
of a cell is stored as soon as it is known, one line of JSON in `results/FIGURE.jsonl`. A later run
trains only cells without an undisturbed result. A disturbed one is repeated, and stays in the file.

The speeds of the workers differ from group to group, as their limits are only roughly kept, and
from day to day. So results of one group are compared where there are such. `MARKS` explains the
marks of all other figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from evenstride.lab.processes.speeds import Speeds

RESULTS = Path(__file__).with_name("results")
DRIFT = 0.1
"""Largest change of a worker's speed, from before a cell to after it, that does not disturb it."""
TOTAL = 1.5
"""Cores of every cluster: three equal workers then fit on two cores, two of them on one."""
MARKS = """\
- A worker's speed is calibrated before and after each cell. If it changed by more than 10 %, the
  cell is *disturbed*, and is repeated once. A `*` marks figures that need a disturbed result.
- A `†` marks figures that compare results of different groups of processes or of different days.
  The speeds of the workers differ between these."""
FIXED, CURVE, UNIFORM, ADAPTIVE = "fixed", "curve", "uniform", "adaptive"
Record = dict[str, Any]
"""A cell with its result, as stored."""


@dataclass(frozen=True, slots=True)
class PaperJob:
    """What is trained."""

    title: str
    batch: int
    epoch_steps: int  # steps of an epoch; the data have as many whole batches
    rate: float  # learning rate of a global batch
    target: float  # test accuracy to reach, or test loss of a regression
    most_epochs: int

    def reached(self, score: float, *, regression: bool) -> bool:
        return score <= self.target if regression else score >= self.target


REGRESSION = "linear"
JOBS = {
    "resnet": PaperJob("ResNet of three blocks, Fashion-MNIST", 312, 10, 0.05, 0.745, 14),
    "cnn": PaperJob("CNN, Fashion-MNIST", 312, 10, 0.1, 0.75, 14),
    "short-cnn": PaperJob("CNN, Fashion-MNIST", 312, 5, 0.1, 0.75, 28),
    REGRESSION: PaperJob("linear regression, power plant", 312, 20, 0.01, 0.1, 12),
}


@dataclass(frozen=True, slots=True)
class PaperCluster:
    """Workers, and how their speeds change."""

    speeds: Speeds  # at the first step, in cores
    changes: tuple[tuple[int, Speeds], ...] = ()  # step and speeds from there on
    steps: int | None = None  # steps to train; ``None`` to train to the target

    def mean_speeds(self) -> Speeds:
        """Return the mean speed of each worker over the steps."""
        starts = [0, *(first for first, _ in self.changes), self.steps or 1]
        spans = [after - first for first, after in pairwise(starts)]
        phases = [self.speeds, *(speeds for _, speeds in self.changes)]
        weighted = zip(
            *([n * one for one in phase] for n, phase in zip(spans, phases, strict=True)),
            strict=True,
        )
        return tuple(sum(parts) / sum(spans) for parts in weighted)


def of_cores(*cores: float) -> Speeds:
    """Return speeds in proportion to a paper's cores, with the total of every cluster."""
    return tuple(TOTAL * one / sum(cores) for one in cores)


@dataclass(frozen=True, slots=True)
class PaperCell:
    """One training. ``fixed`` is the best split by the calibration, fixed from the first step.

    A cell with the policy ``curve`` trains nothing. It measures steps of several sizes.
    """

    job: str
    cluster: str
    policy: str
    seed: int = 0
    sync: str = "bsp"

    @property
    def together(self) -> tuple[Any, ...]:
        """What the cells of one group of processes have in common."""
        alone = "" if self.sync == "bsp" else self.policy  # servers start in each cell
        return self.job, self.cluster, self.sync, self.seed, alone

    def has(self, words: Iterable[str]) -> bool:
        """Return whether each word is a field of this cell."""
        return set(words) <= {str(value) for value in asdict(self).values()}


def cell_of(record: Record) -> PaperCell:
    """Return the cell of a stored result."""
    return PaperCell(**{one.name: record[one.name] for one in fields(PaperCell)})


def group_of(record: Record) -> tuple[str, tuple[float, ...]]:
    """Return what identifies the group of processes of a result: its day and its calibration."""
    return record["date"], tuple(record.get("achieved", ()))


def in_turns(seed: int, policies: Sequence[str]) -> list[str]:
    """Return the policies in another order for each seed, so that a drift cancels."""
    first = seed % len(policies)
    turned = [*policies[first:], *policies[:first]]
    return turned[::-1] if seed % 2 else turned


def groups(cells: Iterable[PaperCell]) -> Iterator[list[PaperCell]]:
    """Yield the cells that the same processes train, in their order."""
    for _, group in groupby(cells, lambda cell: cell.together):
        yield list(group)


class CellStore:
    """The results of a figure in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def records(self) -> list[Record]:
        """Return all results, disturbed ones included, in the order they were measured.

        A line without an end is left out. Its run was killed while it wrote.
        """
        if not self._path.exists():
            return []
        lines = self._path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def add(self, record: Record) -> None:
        """Append a result, in place of a line without an end."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def best(self) -> dict[PaperCell, Record]:
        """Return the least disturbed result of each cell, the first of several undisturbed ones."""
        found: dict[PaperCell, Record] = {}
        for record in sorted(self.records(), key=disturbance):
            found.setdefault(cell_of(record), record)
        return found

    def missing(self, cells: Iterable[PaperCell]) -> list[PaperCell]:
        """Return the cells without an undisturbed result."""
        done = {cell_of(one) for one in self.records() if not disturbed(one)}
        return [cell for cell in cells if cell not in done]


def disturbed(record: Record) -> bool:
    """Return whether the machine's speed changed too much while a cell was measured."""
    return bool(record["drift"] > DRIFT)


def disturbance(record: Record) -> float:
    """Return the change of the machine's speed while a cell was measured; 0 if undisturbed."""
    return float(record["drift"]) if disturbed(record) else 0.0


def mark(*records: Record) -> str:
    """Return the mark of figures of which a result was disturbed; empty if none was."""
    return "*" if any(map(disturbed, records)) else ""
