"""The request and the state of a search, in a file from which an interrupted search continues."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenstride.core.convergence.batch_laws import MeasuredTraining
from evenstride.errors import ConfigError
from evenstride.lab.processes.speeds import Speeds
from evenstride.planner.online_forecast import Configuration, OnlineForecast, Probe
from evenstride.planner.online_policy import Overhead
from evenstride.planner.search.selection import Objective
from evenstride.planner.workload.model_reuse import ReusedPart
from evenstride.planner.workload.workload_profile import WorkloadProfile

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints, in the folder of a run."""
NAME = "online.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class OnlineRequest:
    """The request for a search."""

    command: tuple[str, ...]  # script and arguments
    workers: tuple[int, ...]  # numbers of workers to choose from
    # Global batches to choose from; empty for the script's own.
    batches: tuple[int, ...]
    epochs: float  # of the training at the smallest batch
    objective: Objective  # time, cost or the knee of both
    usd_per_h: float
    speeds: Speeds  # of the workers; empty for no CPU limits
    folder: Path  # of the run
    probe_steps: int = 40  # steps of each worker in the measurement of a configuration
    # Whether training starts from the newest checkpoint in the script's own folder.
    restore: bool = False
    # Earlier trainings that reached the target, at two batches or more; may be empty.
    trained: tuple[MeasuredTraining, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Return the settings that must be equal to continue this search, as JSON types."""
        plain = {
            "script": list(self.command),
            "workers": sorted(set(self.workers)),
            "batches": sorted(set(self.batches)),
            "epochs": self.epochs,
            "objective": str(self.objective),
            "price": self.usd_per_h,
            "speeds": list(self.speeds),
            "restore": self.restore,
        }
        # Left out if empty, so that a search without it continues from folders of earlier versions.
        trained = [[one.batch, one.epochs] for one in self.trained]
        return {**plain, "trained": trained} if trained else plain


@dataclass(frozen=True, slots=True)
class Switch:
    """One change of configuration."""

    source: Configuration  # configuration before
    target: Configuration  # configuration after
    gap_s: float  # from the last step before to the end of the first step after
    slowed_s: float  # delay of the steps before, caused by the start of the next processes

    @property
    def cost_s(self) -> float:
        return self.gap_s + self.slowed_s

    def to_plain(self) -> dict[str, Any]:
        return {
            "from": [self.source.workers, self.source.batch],
            "to": [self.target.workers, self.target.batch],
            "gap_s": self.gap_s,
            "slowed_s": self.slowed_s,
        }


@dataclass(slots=True)
class SearchJournal:
    """The state of a search, in memory and in a file.

    Each method writes the file before it returns, so a search that is killed continues with all its
    decisions.
    """

    file: Path
    asked: dict[str, Any]  # the request; a search with another one cannot continue from the file
    phases: int = 0  # started so far
    present: Configuration | None = None  # of the current phase
    chosen: Configuration | None = None  # final configuration; ``None`` before the choice
    reason: str = ""  # for the latest decision
    probes: list[Probe] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    # Samples by batch, of phases that have ended.
    trained: dict[int, float] = field(default_factory=dict)
    search_s: float = 0.0  # seconds of training before the choice, without interruptions
    # Epochs of the whole training in the present configuration, if known.
    epochs: int | None = None

    def start_phase(self) -> int:
        """Count a phase that is about to start; return its number."""
        self.phases += 1
        self._write()
        return self.phases

    def enter(self, choice: Configuration, epochs: int) -> None:
        """Record the configuration of the current phase, and the epochs given to its script."""
        self.present, self.epochs = choice, epochs
        self._write()

    def note(self, probe: Probe) -> None:
        """Add a measurement."""
        self.probes.append(probe)
        self._write()

    def decide(self, reason: str, epochs: int) -> None:
        """Record the reason for the next configuration, and the epochs of the present one."""
        self.reason, self.epochs = reason, epochs
        self._write()

    def switched(self, switch: Switch, trained_s: float) -> None:
        """Add a switch, and the seconds of the phase before it."""
        self.switches.append(switch)
        self.search_s += trained_s
        self._write()

    def stay(self, choice: Configuration, reason: str) -> None:
        """Record the configuration that trains to the end, and the reason."""
        self.chosen, self.reason = choice, reason
        self._write()

    def train(self, batch: int, samples: float) -> None:
        """Add trained samples; a negative number removes lost work."""
        self.trained[batch] = max(self.trained.get(batch, 0.0) + samples, 0.0)
        self._write()

    @property
    def samples(self) -> float:
        return sum(self.trained.values())

    def switch_s(self, usual_s: float) -> float:
        """Return the mean cost of the switches so far, or ``usual_s`` before the first."""
        costs = [one.cost_s for one in self.switches]
        return sum(costs) / len(costs) if costs else usual_s

    def to_plain(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "asked": self.asked,
            "phases": self.phases,
            "present": _plain(self.present),
            "chosen": _plain(self.chosen),
            "reason": self.reason,
            "probes": [one.to_plain() for one in self.probes],
            "switches": [one.to_plain() for one in self.switches],
            "trained": sorted(self.trained.items()),
            "search_s": self.search_s,
            "epochs": self.epochs,
        }

    def _write(self) -> None:
        # Renamed into place: if the search is killed while it writes, the old file remains.
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.to_plain(), indent=1), encoding="utf-8")
        new.replace(self.file)


@dataclass(frozen=True, slots=True)
class OnlineResult:
    """The result of a search."""

    journal: SearchJournal
    # Forecasts of all configurations at the time of the choice, the best first.
    foreseen: tuple[OnlineForecast, ...]
    # Measurement of the chosen configuration after the switch; ``None`` if training ended before.
    after: Probe | None
    # Cost of the search; ``None`` without a choice, or if the search was continued.
    overhead: Overhead | None
    total_s: float  # seconds of training since the latest start, from its first step.
    continued: bool = False  # whether the search was interrupted and continued.
    epochs_by: str = ""  # where the epochs at other batches come from; empty before a decision.
    profile: WorkloadProfile | None = None  # what was measured, for the store
    reused: tuple[ReusedPart, ...] = ()  # what was taken from the store


def opened(folder: Path, asked: dict[str, Any]) -> SearchJournal:
    """Return the journal in the folder of a run, or a new one."""
    file = folder / NAME
    if not file.exists():
        return SearchJournal(file, asked)
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        if plain["format"] == _FORMAT and plain["asked"] == asked:
            return _read(file, plain)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(
            f"cannot read {file} ({error}); give another --folder to start a new search"
        ) from None
    before = plain.get("asked", {})
    changed = sorted(name for name in {*asked, *before} if asked.get(name) != before.get(name))
    raise ConfigError(
        f"{folder} belongs to a search with other {', '.join(changed) or 'settings'}; use the "
        "same settings to continue it, or give another --folder to start a new search"
    )


def _read(file: Path, plain: dict[str, Any]) -> SearchJournal:
    return SearchJournal(
        file,
        plain["asked"],
        plain["phases"],
        _choice(plain["present"]),
        _choice(plain["chosen"]),
        plain["reason"],
        [Probe.from_plain(one) for one in plain["probes"]],
        [_switch(one) for one in plain["switches"]],
        {int(batch): float(samples) for batch, samples in plain["trained"]},
        plain["search_s"],
        plain["epochs"],
    )


def _plain(choice: Configuration | None) -> list[int] | None:
    return None if choice is None else [choice.workers, choice.batch]


def _choice(plain: Sequence[int] | None) -> Configuration | None:
    return None if plain is None else Configuration(*plain)


def _switch(plain: dict[str, Any]) -> Switch:
    return Switch(
        Configuration(*plain["from"]),
        Configuration(*plain["to"]),
        plain["gap_s"],
        plain["slowed_s"],
    )
