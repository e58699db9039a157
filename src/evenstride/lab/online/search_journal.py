"""What a search is asked for, and what it has come to, kept so that it goes on after an end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenstride.errors import ConfigError
from evenstride.lab.processes.speeds import Speeds
from evenstride.planner.online_forecast import Configuration, OnlineForecast, Probe
from evenstride.planner.online_policy import Overhead
from evenstride.planner.search.selection import Objective

CHECKPOINTS = "checkpoints"
"""In the folder of a run: where its checkpoints are."""
NAME = "online.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class OnlineRequest:
    """What is searched for."""

    command: tuple[str, ...]  # script and arguments
    workers: tuple[int, ...]  # numbers of them to choose from
    batches: tuple[int, ...]  # global batches to choose from; empty for the script's own
    epochs: float  # that training lasts at the smallest batch
    objective: Objective  # time, cost or the knee of both
    usd_per_h: float  # price of a worker
    speeds: Speeds  # of the workers; empty to run them as they are
    folder: Path  # of the run
    probe_steps: int = 40  # steps of each worker by which a configuration is measured
    # Whether training starts from the newest checkpoint in the script's own folder.
    restore: bool = False

    def to_plain(self) -> dict[str, Any]:
        """Return what another search must share to go on with this one, as JSON types."""
        return {
            "script": list(self.command),
            "workers": sorted(set(self.workers)),
            "batches": sorted(set(self.batches)),
            "epochs": self.epochs,
            "objective": str(self.objective),
            "price": self.usd_per_h,
            "speeds": list(self.speeds),
            "restore": self.restore,
        }


@dataclass(frozen=True, slots=True)
class Switch:
    """One change of configuration."""

    source: Configuration  # configuration before
    target: Configuration  # configuration after
    gap_s: float  # between the last step of one and the first of the other, which is in it
    slowed_s: float  # by which steps before it were longer, as the next processes were starting

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
    """What is known so far, in memory and in a file.

    Each method writes the file before it returns, so a search that is killed goes on with all
    that was decided.
    """

    file: Path  # where it is kept
    asked: dict[str, Any]  # what the search was asked for; another one cannot go on from it
    phases: int = 0  # started so far
    present: Configuration | None = None  # configuration that training is in
    chosen: Configuration | None = None  # where training stays; ``None`` while it is not known
    reason: str = ""  # for the latest decision
    probes: list[Probe] = field(default_factory=list)  # what was measured, in order
    switches: list[Switch] = field(default_factory=list)  # made so far
    # Samples by batch, of phases that have ended.
    trained: dict[int, float] = field(default_factory=dict)
    search_s: float = 0.0  # seconds of training before it stayed, where nothing has interrupted it
    # That the whole training lasts in the present configuration, as far as it is known.
    epochs: int | None = None

    def start_phase(self) -> int:
        """Count a phase that is about to start; return its number."""
        self.phases += 1
        self._write()
        return self.phases

    def enter(self, choice: Configuration, epochs: int) -> None:
        """Note the configuration that now trains, and the epochs that its script was given."""
        self.present, self.epochs = choice, epochs
        self._write()

    def note(self, probe: Probe) -> None:
        """Add a measurement to those made before, also of the same configuration."""
        self.probes.append(probe)
        self._write()

    def decide(self, reason: str, epochs: int) -> None:
        """Note why the next configuration was chosen, and the epochs that the present one needs."""
        self.reason, self.epochs = reason, epochs
        self._write()

    def switched(self, switch: Switch, trained_s: float) -> None:
        """Add a switch, and the seconds that the phase before it took."""
        self.switches.append(switch)
        self.search_s += trained_s
        self._write()

    def stay(self, choice: Configuration, reason: str) -> None:
        """Note the configuration that trains to the end, and why."""
        self.chosen, self.reason = choice, reason
        self._write()

    def train(self, batch: int, samples: float) -> None:
        """Add trained samples; a negative number takes back work that was lost."""
        self.trained[batch] = max(self.trained.get(batch, 0.0) + samples, 0.0)
        self._write()

    @property
    def samples(self) -> float:
        return sum(self.trained.values())

    def switch_s(self, usual_s: float) -> float:
        """Return what a switch costs: as those before on average, or a usual one."""
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
        # Renamed into place: a search that is killed while it writes leaves the former file.
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.to_plain(), indent=1), encoding="utf-8")
        new.replace(self.file)


@dataclass(frozen=True, slots=True)
class OnlineResult:
    """What a search came to."""

    journal: SearchJournal  # of the search
    # All configurations as they looked when the choice was made, the best first.
    foreseen: tuple[OnlineForecast, ...]
    # What the chosen configuration was measured to take after the switch; ``None`` if training
    # ended before.
    after: Probe | None
    # What the search has cost; ``None`` if nothing was chosen, or it was continued.
    overhead: Overhead | None
    total_s: float  # of training since the search was last started, from the first step on
    continued: bool = False  # whether it was begun before, and ended in between


def opened(folder: Path, asked: dict[str, Any]) -> SearchJournal:
    """Return the journal of a run's folder; a new one, if there is none."""
    file = folder / NAME
    if not file.exists():
        return SearchJournal(file, asked)
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        if plain["format"] == _FORMAT and plain["asked"] == asked:
            return _read(file, plain)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}); give another --folder to begin anew"
        ) from None
    before = plain.get("asked", {})
    changed = sorted(name for name in asked if asked[name] != before.get(name))
    raise ConfigError(
        f"{folder} is of a search with other {', '.join(changed) or 'settings'}; ask for the "
        "same to go on with it, or give another --folder to begin anew"
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
