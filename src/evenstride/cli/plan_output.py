"""The output of ``evenstride plan``: text and JSON."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evenstride.cli.plan_store import PlannedJob
from evenstride.cli.start_files import StartFiles
from evenstride.core.formatting import listed
from evenstride.planner.catalogue.offers import Catalogue, price_label
from evenstride.planner.launch_files import start_lines, variables
from evenstride.planner.make_plan import Plan
from evenstride.planner.search.candidates import Rentable, accelerators_of
from evenstride.planner.workload.workload_profile import WorkloadProfile
from evenstride.report import plan_text

_MOST_NOTES = 5
_MOST_REFUSALS, _MOST_NAMED = 5, 8
_WIDTH = 100  # without a terminal
_UNKNOWN_SCRIPT = "train.py"


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its inputs."""

    plan: Plan
    job: PlannedJob
    catalogue: Catalogue
    machines: Rentable
    sync: str = "bsp"

    @property
    def profile(self) -> WorkloadProfile:
        return self.job.profile

    @property
    def command(self) -> tuple[str, ...]:
        """Script and arguments for the start lines; a placeholder if the script is unknown."""
        return self.job.script or (_UNKNOWN_SCRIPT,)

    @property
    def variables(self) -> dict[str, str]:
        """The plan's environment variables for the script."""
        return variables(self.plan.chosen.outlook, self.sync)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.plan.to_dict(),
            "variables": self.variables,
            "catalogue": self.catalogue.source,
            "rows_refused": [str(one) for one in self.catalogue.refusals],
            "types_left_out": list(self.machines.unknown),
            "types_measured": list(self.machines.measured),
            "types_pretended": list(self.machines.pretended),
            "target": self.profile.target,
            "trainings": [one.model_dump() for one in self.profile.trainings],
            "reused": [one.to_dict() for one in self.job.reused],
            "stored": list(map(str, self.job.stored)),
        }


def text_of(one: Planned, files: Sequence[StartFiles], *, explain: bool) -> str:
    """Return a plan as text, wrapped to the terminal.

    ``explain`` adds the notes after the first five.
    """
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    notes, prices = _notes(one), "; ".join(_prices(one))
    shown = notes if explain else notes[:_MOST_NOTES]
    prose = [plan_text.story(one.plan), f"Price: {prices}."]
    prose += ["", "Notes:", *(f"- {note}" for note in shown)]
    if left_out := len(notes) - len(shown):
        prose.append(f"- {left_out} more: --explain")
    table = [plan_text.text(one.plan, width), plan_text.below(one.plan), ""]
    lines = [f"Prices from {one.catalogue.source}.", "", *table, *prose]
    lines = [part for line in lines for part in _wrapped(line, width)]
    choice = one.plan.chosen.outlook.choice
    both = f"a global batch of {choice.batch} and {one.variables['EVENSTRIDE_EPOCHS']} epochs"
    where = "" if one.job.script else f" (replace {_UNKNOWN_SCRIPT}, or give --script)"
    lines += ["", f"To start it with {both} in the script{where}:"]
    lines += start_lines(choice, one.command, one.variables)
    lines += [line for file in files for line in file.lines]
    lines += [f"stored {file}" for file in one.job.stored]
    return "\n".join(lines)


def _notes(one: Planned) -> list[str]:
    """Return what limits the plan's figures, the most important first."""
    searched, refused = plan_text.looked(one.plan), one.catalogue.refusals
    doubtful = bool(one.plan.gap or one.plan.found.front_gap)
    notes = [searched] if doubtful else []
    notes += [*one.plan.caveats, *_trainings(one.profile), *one.catalogue.notes]
    notes += [f"catalogue row refused, {refusal}" for refusal in refused[:_MOST_REFUSALS]]
    if len(refused) > _MOST_REFUSALS:
        notes.append(f"{len(refused) - _MOST_REFUSALS} more rows of the catalogue were refused")
    if one.machines.unknown:
        notes.append(
            f"types without a usable measurement: {listed(one.machines.unknown, _MOST_NAMED)}"
        )
    return notes if doubtful else [*notes, searched]


def _wrapped(line: str, width: int) -> list[str]:
    """Return a paragraph in lines of limited width, and tables unchanged."""
    if len(line) <= width or "\n" in line:
        return [line]
    indent = " " * (len(line) - len(line.lstrip(" -")))
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def as_json(one: Planned, files: Sequence[StartFiles]) -> str:
    written = [str(path) for file in files for path in file.paths]
    return json.dumps({**one.to_dict(), "files": written})


def _prices(one: Planned) -> list[str]:
    """Return the prices of the chosen machines, with their dates."""
    offers = {(o.instance_type, o.place, accelerators_of(o)): o for o in one.catalogue.offers}
    kinds = one.plan.chosen.outlook.choice.kinds
    own = [(kind, offers[kind.type, kind.place, kind.accelerators]) for kind in kinds]
    return [f"{kind.name}: {price_label(offer, spot=kind.spot)}" for kind, offer in own]


def _trainings(profile: WorkloadProfile) -> list[str]:
    """Return the epochs of the trainings behind the plan, if their target is known."""
    each = [f"{one.epochs:.3g} at {one.batch}" for one in profile.trainings]
    return [f"epochs to {profile.target}: {', '.join(each)}"] if profile.target and each else []
