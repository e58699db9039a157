"""What ``evenstride plan`` does with what it is asked."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from evenstride._version import __version__
from evenstride.cli import quantities
from evenstride.cli.preemptions import with_preemptions
from evenstride.errors import ConfigError
from evenstride.planner.catalogue import read_catalogue, shipped_catalogue
from evenstride.planner.choosing import Objective, Wishes
from evenstride.planner.epochs import epochs_of
from evenstride.planner.evidence import profile_of_run
from evenstride.planner.infeasible import selected
from evenstride.planner.kinds import Kind
from evenstride.planner.live import live_catalogue
from evenstride.planner.losses import Saves
from evenstride.planner.offers import Catalogue, price_label
from evenstride.planner.outlook import USUAL_SAVES, Choice, Task
from evenstride.planner.plan import Plan, batches_about, make_plan
from evenstride.planner.reducing import servers_of
from evenstride.planner.renting import Rentable, accelerators_of, rentable
from evenstride.planner.starting import skypilot_files, torchrun_lines, variables
from evenstride.planner.targets import LOSS, Aim, require_target, towards
from evenstride.planner.workload import (
    Links,
    Profile,
    Training,
    merged,
    read_profile,
    require_versions,
)
from evenstride.report import planned
from evenstride.trace.read import TRACE_NAME, trace_path

_Chosen = TypeVar("_Chosen", bound=StrEnum)
_MOST_REFUSALS = 5


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for, as on the command line; see there."""

    runs: tuple[Path, ...]
    catalog: Path | None
    epochs: float | None
    deadline: str | None
    budget: float | None
    objective: str | None
    confidence: float
    spot: bool
    batches: str | None
    max_nodes: int
    mixed: bool
    regions: str
    types: str
    transfer: bool
    links: str | None
    trained: tuple[str, ...]
    target_loss: float | None
    metric: str
    types_of_run: str
    restart: str
    live: str
    force: bool
    preemptions: tuple[str, ...] = ()
    sync: str = "bsp"


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it was made of."""

    plan: Plan
    profile: Profile
    catalogue: Catalogue
    machines: Rentable
    sync: str = "bsp"

    @property
    def variables(self) -> dict[str, str]:
        """What a script is told of the plan, as variables of its environment."""
        return variables(self.plan.chosen.outlook, self.sync)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            **self.plan.to_dict(),
            "variables": self.variables,
            "catalogue": self.catalogue.source,
            "rows_refused": [str(one) for one in self.catalogue.refusals],
            "types_left_out": list(self.machines.unknown),
            "types_measured": list(self.machines.measured),
            "target": self.profile.target,
            "trainings": [one.model_dump() for one in self.profile.trainings],
        }


def planned_for(asked: Asked, today: date) -> Planned:
    """Return the plan that is asked for.

    Raises:
        ConfigError: something in it is not understood, or nothing fits.
    """
    wishes, links = _wishes(asked), _links(asked.links)
    profile, told = _workload(asked)
    epochs = epochs_of(profile, asked.epochs)
    task = Task(
        *(profile.samples, epochs, profile.model.gradient_bytes, links or profile.links),
        *(_saves(asked), servers_of(asked.sync)),
    )
    batches = (
        batches_about(profile.global_batch, task, (one.batch for one in profile.trainings))
        if asked.batches is None
        else quantities.wholes(asked.batches, "--batches")
    )
    whole = _catalogue(asked, today)
    catalogue = selected(whole, quantities.names(asked.regions), quantities.names(asked.types))
    machines = rentable(
        catalogue.offers,
        profile.devices,
        today,
        spot=asked.spot,
        transfer=asked.transfer,
        known_offers=whole.offers,
    )
    kinds = with_preemptions(machines.kinds, asked.preemptions, spot=asked.spot)
    made = make_plan(
        kinds,
        task,
        wishes,
        batches or (profile.global_batch,),
        most_machines=asked.max_nodes,
        mixed=asked.mixed,
    )
    made = replace(made, caveats=(*made.caveats, *told, *_spotless(kinds, asked)))
    return Planned(made, profile, catalogue, machines, asked.sync)


def _spotless(kinds: Sequence[Kind], asked: Asked) -> list[str]:
    if not asked.spot or any(kind.spot for kind in kinds):
        return []
    return ["no machine that could be planned with has a spot price, so --spot changes nothing"]


def tell(one: Planned, command: Sequence[str], files: Sequence[Path]) -> str:
    """Return a plan as people read it, no wider than the terminal."""
    width = shutil.get_terminal_size((120, 24)).columns
    refused = one.catalogue.refusals
    lines = [f"prices: {one.catalogue.source}"]
    lines += [f"  {note}" for note in one.catalogue.notes]
    lines += [f"  refused, {refusal}" for refusal in refused[:_MOST_REFUSALS]]
    if len(refused) > _MOST_REFUSALS:
        lines.append(f"  and {len(refused) - _MOST_REFUSALS} more rows")
    if one.machines.unknown:
        lines.append(
            f"{len(one.machines.unknown)} types left out, of which nothing was measured that could "
            "be carried over"
        )
    lines += ["", planned.table(one.plan).text(width), "", planned.story(one.plan)]
    lines += [f"- {kind}" for kind in (*_trainings(one.profile), *_prices(one))]
    choice = one.plan.chosen.outlook.choice
    told = one.variables
    both = f"a global batch of {choice.batch} and {told['EVENSTRIDE_EPOCHS']} epochs"
    lines += ["", f"To start it, with {both} in the script:"]
    lines += [*torchrun_lines(choice, command, told), *_sky_lines(choice, files)]
    return "\n".join(lines)


def _sky_lines(choice: Choice, files: Sequence[Path]) -> list[str]:
    """Return how SkyPilot starts the tasks; it looks for other machines only in managed jobs."""
    if len(files) == 1:
        how = "sky jobs launch" if choice.spot else "sky launch"
        return [f"{how} {shlex.quote(str(file))}" for file in files]
    return [
        f"sky launch {'--env EVENSTRIDE_HEAD=ADDRESS ' if number else ''}{shlex.quote(str(file))}"
        for number, file in enumerate(files)
    ]


def write_sky(one: Planned, folder: Path, command: Sequence[str]) -> list[Path]:
    """Write SkyPilot's files for the chosen cluster, and return them.

    Raises:
        ConfigError: they cannot be written.
    """
    written, choice = [], one.plan.chosen.outlook.choice
    texts = skypilot_files(choice, command, one.variables, torch=one.profile.torch)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
            written.append(folder / name)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error.strerror}") from None
    return written


def as_json(one: Planned, files: Sequence[Path]) -> str:
    """Return a plan as one JSON object."""
    return json.dumps({**one.to_dict(), "files": list(map(str, files))})


def _prices(one: Planned) -> list[str]:
    """Return what the chosen machines cost, with the days of their prices."""
    offers = {(o.instance_type, o.place, accelerators_of(o)): o for o in one.catalogue.offers}
    kinds = one.plan.chosen.outlook.choice.kinds
    own = [(kind, offers[kind.type, kind.place, kind.accelerators]) for kind in kinds]
    return [f"{kind.name}: {price_label(offer, spot=kind.spot)}" for kind, offer in own]


def _trainings(profile: Profile) -> list[str]:
    """Return how long the trainings took that a plan goes by, if they came to a known target."""
    each = [f"{one.epochs:.3g} at {one.batch}" for one in profile.trainings]
    return [f"epochs to {profile.target}: {', '.join(each)}"] if profile.target and each else []


def _wishes(asked: Asked) -> Wishes:
    inf = float("inf")
    if asked.budget is not None and not 0 < asked.budget < inf:
        raise ConfigError(f"--budget is {asked.budget}; give an amount in USD above 0, such as 40")
    return Wishes(
        None if asked.objective is None else _one_of(Objective, asked.objective, "--objective"),
        inf if asked.deadline is None else quantities.seconds(asked.deadline, "--deadline"),
        inf if asked.budget is None else asked.budget,
        asked.confidence,
    )


def _check(profiles: Sequence[Profile], asked: Asked) -> None:
    for profile in profiles:
        require_versions(profile, __version__, installed_torch(), force=asked.force)
    batches = sorted({profile.global_batch for profile in profiles})
    if asked.epochs is not None and len(batches) > 1:
        raise ConfigError(
            f"the profiles are of scripts with batches of {' and '.join(map(str, batches))}, so it "
            "is not clear at which of them --epochs counts; give --trained BATCH:EPOCHS instead"
        )


def _catalogue(asked: Asked, today: date) -> Catalogue:
    if asked.live:
        if asked.catalog is not None:
            raise ConfigError("prices are asked for twice; give --catalog or --live")
        return live_catalogue(today, quantities.names(asked.live))
    return shipped_catalogue() if asked.catalog is None else read_catalogue(asked.catalog)


def _saves(asked: Asked) -> Saves:
    if asked.restart and not asked.spot:
        raise ConfigError("--restart tells of spot machines; give --spot as well, or leave it out")
    each = quantities.names(asked.restart)
    restarts_s = tuple(quantities.seconds(one, "--restart") for one in each)
    return replace(USUAL_SAVES, restart_s=restarts_s) if restarts_s else USUAL_SAVES


def _workload(asked: Asked) -> tuple[Profile, list[str]]:
    """Return what is to be trained, and what is to be known of the runs that tell it."""
    profiles, told = _profiles(asked)
    if asked.epochs is not None or asked.trained:
        # Epochs are given, so it does not matter what the trainings of the profiles came to.
        profiles = [one.model_copy(update={"target": ""}) for one in profiles]
    profile = merged(profiles, force=asked.force)
    if asked.trained:
        profile = profile.model_copy(update={"trainings": tuple(map(_training, asked.trained))})
    return profile, told


def _profiles(asked: Asked) -> tuple[list[Profile], list[str]]:
    """Return what the runs and profiles tell, and what is to be known of the runs."""
    aim, profiles, told = _aim(asked), list[Profile](), list[str]()
    measured = not all(_is_run(path) for path in asked.runs)
    for path in _each_once(asked.runs):
        if not _is_run(path):
            profiles.append(read_profile(path))
            continue
        types = _types(path, asked.types_of_run, needed=not measured)
        trace = trace_path(path)
        found = profile_of_run(trace, types)
        found, note = (found, "") if aim is None else towards(found, trace, aim)
        profiles.append(found)
        told += [note] if note else []
    _check(profiles, asked)
    if aim is not None:
        require_target(profiles, aim, told)
    return profiles, told


def _each_once(paths: Sequence[Path]) -> list[Path]:
    """Return paths without those that lead to the same file as an earlier one."""
    found = dict[Path, Path]()
    for path in paths:
        found.setdefault((path / TRACE_NAME if path.is_dir() else path).resolve(), path)
    return list(found.values())


def _aim(asked: Asked) -> Aim | None:
    given = {
        "--epochs": asked.epochs is not None,
        "--trained": bool(asked.trained),
        "--target-loss": asked.target_loss is not None,
    }
    named = [option for option, there in given.items() if there]
    if len(named) > 1:
        raise ConfigError(
            f"how long training lasts is said twice; give {' or '.join(named)}, not both"
        )
    if asked.target_loss is None:
        if asked.metric != LOSS:
            raise ConfigError(
                f"--metric is {asked.metric!r}, and no --target-loss says what it is to come to; "
                "give that, or leave --metric out"
            )
        return None
    return Aim(asked.target_loss, asked.metric)


def _is_run(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".jsonl"


def _types(path: Path, types: str, *, needed: bool) -> tuple[str, ...]:
    named = quantities.names(types)
    if needed and not named:
        raise ConfigError(
            f"{path} is a run, which does not say what its machines are called; give --as TYPE, or "
            "a type for each worker, such as --as g5.xlarge,g4dn.xlarge, or a profile beside it "
            "(evenstride profile), whose times count then"
        )
    return named


def _training(text: str) -> Training:
    batch, _, epochs = text.partition(":")
    try:
        return Training(batch=int(batch), epochs=float(epochs))
    except ValueError:  # pydantic's is one, too
        raise ConfigError(
            f"--trained is {text!r}; give a batch and the epochs it took to the target, such as "
            "256:12.5"
        ) from None


def _links(text: str | None) -> Links | None:
    if text is None:
        return None
    latency, _, bandwidth = text.partition(":")
    try:
        found = Links(latency_s=float(latency) / 1e3, bytes_per_s=float(bandwidth) * 1e9 / 8)
    except ValueError:  # pydantic's is one, too
        raise ConfigError(
            f"--links is {text!r}; give milliseconds and Gbit/s, such as 0.1:10"
        ) from None
    return found


def _one_of(kind: type[_Chosen], text: str, option: str) -> _Chosen:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; it can be {', '.join(kind)}") from None


def installed_torch() -> str:
    """Return torch's version without importing it; empty if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
