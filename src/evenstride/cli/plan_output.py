"""What ``evenstride plan`` prints and writes of a plan that was made."""

from __future__ import annotations

import json
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import Catalogue, price_label
from evenstride.planner.launch_files import skypilot_files, start_lines, variables
from evenstride.planner.make_plan import Plan
from evenstride.planner.search.candidates import Rentable, accelerators_of
from evenstride.planner.search.training_forecast import ClusterChoice
from evenstride.planner.workload.workload_profile import WorkloadProfile
from evenstride.report import plan_text

_MOST_REFUSALS, _MOST_NAMED = 5, 8
_UNKNOWN_SCRIPT = "train.py"


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it was made of."""

    plan: Plan
    profile: WorkloadProfile
    catalogue: Catalogue
    machines: Rentable
    sync: str = "bsp"
    script: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """Script and arguments for the start lines; a name that stands for it if not known."""
        return self.script or (_UNKNOWN_SCRIPT,)

    @property
    def variables(self) -> dict[str, str]:
        """What a script is told of the plan, as variables of its environment."""
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
        }


def tell(one: Planned, files: Sequence[Path]) -> str:
    """Return a plan as people read it; its table no wider than the terminal."""
    width = shutil.get_terminal_size((120, 24)).columns
    refused = one.catalogue.refusals
    lines = [f"prices: {one.catalogue.source}"]
    lines += [f"  {note}" for note in one.catalogue.notes]
    lines += [f"  refused, {refusal}" for refusal in refused[:_MOST_REFUSALS]]
    if len(refused) > _MOST_REFUSALS:
        lines.append(f"  and {len(refused) - _MOST_REFUSALS} more rows")
    if one.machines.unknown:
        lines.append(
            f"types left out, of which nothing was measured that could be carried over: "
            f"{_some(one.machines.unknown)}"
        )
    prose = plan_text.story(one.plan).splitlines()
    prose += [f"- {kind}" for kind in (*_trainings(one.profile), *_prices(one))]
    lines += ["", plan_text.text(one.plan, width), plan_text.below(one.plan), "", *prose]
    lines = [part for line in lines for part in _wrapped(line, width)]
    choice = one.plan.chosen.outlook.choice
    told = one.variables
    both = f"a global batch of {choice.batch} and {told['EVENSTRIDE_EPOCHS']} epochs"
    where = "" if one.script else f" ({_UNKNOWN_SCRIPT} stands for it; --script tells)"
    lines += ["", f"To start it, with {both} in the script{where}:"]
    lines += [*start_lines(choice, one.command, told), *_sky_lines(choice, files)]
    return "\n".join(lines)


def _wrapped(line: str, width: int) -> list[str]:
    """Return prose in lines no wider than a width; tables are as they are."""
    if len(line) <= width or "\n" in line:
        return [line]
    indent = " " * (len(line) - len(line.lstrip(" -")))
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _sky_lines(choice: ClusterChoice, files: Sequence[Path]) -> list[str]:
    """Return how SkyPilot starts the tasks; it looks for other machines only in managed jobs."""
    if len(files) == 1:
        how = "sky jobs launch" if choice.spot else "sky launch"
        return [f"{how} {shlex.quote(str(file))}" for file in files]
    alone = (
        ["# two tasks: SkyPilot looks for other machines only for a single one (--no-mixed)"]
        if choice.spot and files
        else []
    )
    return alone + [
        f"sky launch {'--env _EVENSTRIDE_HEAD=ADDRESS ' if number else ''}{shlex.quote(str(file))}"
        for number, file in enumerate(files)
    ]


def write_sky(one: Planned, folder: Path) -> list[Path]:
    written, choice = [], one.plan.chosen.outlook.choice
    texts = skypilot_files(choice, one.command, one.variables, torch=one.profile.torch)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
            written.append(folder / name)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error.strerror}") from None
    return written


def as_json(one: Planned, files: Sequence[Path]) -> str:
    return json.dumps({**one.to_dict(), "files": list(map(str, files))})


def _prices(one: Planned) -> list[str]:
    """Return what the chosen machines cost, with the days of their prices."""
    offers = {(o.instance_type, o.place, accelerators_of(o)): o for o in one.catalogue.offers}
    kinds = one.plan.chosen.outlook.choice.kinds
    own = [(kind, offers[kind.type, kind.place, kind.accelerators]) for kind in kinds]
    return [f"{kind.name}: {price_label(offer, spot=kind.spot)}" for kind, offer in own]


def _trainings(profile: WorkloadProfile) -> list[str]:
    """Return how long the trainings took that a plan goes by, if they came to a known target."""
    each = [f"{one.epochs:.3g} at {one.batch}" for one in profile.trainings]
    return [f"epochs to {profile.target}: {', '.join(each)}"] if profile.target and each else []
