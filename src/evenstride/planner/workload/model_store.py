"""A folder of measured jobs, from which later plans take what their job did not measure.

Each file is a profile (`workload_profile`), so it is versioned and checked, and can be given to
``evenstride plan`` itself. It holds measurements. The models of steps, epochs and noise are fitted
to them when they are used, so a better fit applies to older measurements too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from evenstride.errors import ConfigError
from evenstride.planner.workload.workload_profile import (
    DeviceProfile,
    ReachedTraining,
    WorkloadProfile,
    read_profile,
    require_versions,
    surest,
)

OFF = "off"
"""The text that stands for no store."""

LEAST_LIKENESS = 0.8
"""Smallest similarity of a job whose model is reused."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One job in the store."""

    file: Path
    profile: WorkloadProfile


@dataclass(frozen=True, slots=True)
class ModelStore:
    """The readable files of a store, and one sentence on each of the others."""

    folder: Path
    models: tuple[StoredModel, ...] = ()
    skipped: tuple[str, ...] = ()


def store_folder(given: str | None, environment: Mapping[str, str]) -> Path | None:
    """Return the folder of the store; ``None`` for ``off``, or a user without a home.

    Without ``given`` and ``EVENSTRIDE_STORE``, it is ``$XDG_CACHE_HOME/evenstride``, or
    ``~/.cache/evenstride`` if that variable is unset or relative, as the XDG specification has it.
    """
    given = given or environment.get("EVENSTRIDE_STORE")
    if given:
        return None if given == OFF else Path(given).expanduser()
    cache = Path(environment.get("XDG_CACHE_HOME", ""))
    try:
        return (cache if cache.is_absolute() else Path.home() / ".cache") / "evenstride"
    except RuntimeError:  # a user without a home, as in some containers
        return None


def read_store(folder: Path, evenstride: str, torch: str, *, force: bool = False) -> ModelStore:
    """Return the store in a folder, which need not exist.

    A file that is damaged, or was measured with another minor version, is skipped; ``force``
    accepts other versions.
    """
    models, skipped = list[StoredModel](), list[str]()
    for file in sorted(folder.glob("*.json")):
        try:
            profile = read_profile(file)
            require_versions(profile, evenstride, torch, force=force)
        except ConfigError as error:
            skipped.append(f"stored model {file.name} skipped: {error}")
        else:
            models.append(StoredModel(file, profile))
    return ModelStore(folder, tuple(models), tuple(skipped))


def keep(profile: WorkloadProfile, folder: Path) -> Path | None:
    """Store a profile, merged with an earlier one of the same job; return its file if it changed.

    A job is a model, a data set, a command line and a target. The file is replaced as a whole, so
    that no reader sees a part of it. Of two writers at the same moment, the later one wins.

    Raises:
        ConfigError: the file cannot be written.
    """
    file, before = folder / _file_name(profile), None
    with suppress(ConfigError):  # the first of its job, damaged, or of another version
        before = read_profile(file)
        require_versions(before, profile.evenstride, profile.torch)
        profile = _renewed(before, profile)
    if profile == before:
        return None
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
        aside.replace(file)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise ConfigError(
            f"cannot store the model in {folder} ({error.strerror}); give another folder as "
            "--store, or --store off"
        ) from None
    return file


def _file_name(profile: WorkloadProfile) -> str:
    model = profile.model
    job = [model.digest, model.parameters, profile.samples, profile.script, profile.target]
    readable = re.sub(r"[^\w-]+", "-", Path(script_of(profile)).stem) or "run"
    return f"{readable}-{hashlib.sha256(json.dumps(job).encode()).hexdigest()[:12]}.json"


def _renewed(old: WorkloadProfile, new: WorkloadProfile) -> WorkloadProfile:
    """Return both; what the newer profile measured replaces the older measurement of the same.

    Only the noise is the surest of both, since a short run ends before its own has settled.
    """
    devices = {one.type: one for one in old.devices}
    devices |= {one.type: _renewed_device(devices.get(one.type), one) for one in new.devices}
    clusters = {(one.types, one.batch): one for one in (*old.clusters, *new.clusters)}
    trainings = dict[ReachedTraining, None].fromkeys((*old.trainings, *new.trainings))
    others = {name: getattr(old, name) for name in ("links", "beside_s")}
    missing = {name: value for name, value in others.items() if getattr(new, name) is None}
    both = {
        "devices": tuple(devices.values()),
        "clusters": tuple(clusters.values()),
        "trainings": tuple(trainings),
        "noise": surest([new.noise, old.noise]),
    }
    return new.model_copy(update={**both, **missing})


def _renewed_device(old: DeviceProfile | None, new: DeviceProfile) -> DeviceProfile:
    """Return the newer steps of a type, with the older ones of other sizes that still fit.

    An older limit stays until a larger size is measured.
    """
    if old is None or (old.device, old.computed_on) != (new.device, new.computed_on):
        return new
    sizes, most = {point.samples for point in new.points}, new.most_samples
    if most is None and old.most_samples is not None and max(sizes) <= old.most_samples:
        most = old.most_samples
    fitting = (point for point in old.points if most is None or point.samples <= most)
    others = (point for point in fitting if point.samples not in sizes)
    return new.model_copy(update={"points": (*others, *new.points), "most_samples": most})


def words_of(profile: WorkloadProfile) -> tuple[str, ...]:
    """Return script and arguments; an empty tuple if they are unknown."""
    try:
        return tuple(shlex.split(profile.script))
    except ValueError:  # in an older profile, with a quote in it
        return tuple(profile.script.split())


def command_text(command: Sequence[str]) -> str:
    """Return script and arguments for a shell in the folder of the script."""
    return shlex.join((Path(command[0]).name, *command[1:]))


def script_of(profile: WorkloadProfile) -> str:
    """Return the name of the script's file; empty if it is unknown."""
    return next(iter(words_of(profile)), "")


@dataclass(frozen=True, slots=True)
class JobLikeness:
    """How similar two jobs are."""

    same: bool  # whether parameters and data are the same
    part: float  # from 0 to 1
    why: str  # the facts, in words


def likeness(job: WorkloadProfile, other: WorkloadProfile) -> JobLikeness:
    """Return how similar a stored job is: the mean of three facts, each from 0 to 1.

    The facts are the script's file (the same or not), the parameters and the samples of an epoch
    (the smaller number divided by the larger). Parameters are the same if their names and shapes
    are. A job with the same parameters and samples is the same job, whatever its script is called.
    The rule is ours. Scavenger's paper leaves open when jobs are similar.
    """
    script = script_of(job)
    alike = bool(script) and script == script_of(other)
    equal = job.model.digest == other.model.digest and bool(job.model.digest)
    sizes = (job.model.parameters, other.model.parameters), (job.samples, other.samples)
    model, data = (min(pair) / max(pair) for pair in sizes)
    model = 1.0 if equal else min(model, 0.99)
    why = [f"the same script {script}"] if alike else ["another script"]
    why.append("the same parameters" if equal else f"{_times(*sizes[0])} the parameters")
    why.append("the same samples" if data == 1 else f"{_times(*sizes[1])} the samples")
    return JobLikeness(equal and data == 1, (alike + model + data) / 3, ", ".join(why))


def _times(own: int, stored: int) -> str:
    return f"{own / stored:.2g} times"


Ranked = tuple[tuple[StoredModel, JobLikeness], ...]
"""Models of the same or similar jobs, the most similar first, of equals the newest."""


def similar(job: WorkloadProfile, models: Iterable[StoredModel]) -> Ranked:
    """Return the models of the same or similar jobs."""
    both = [(model, likeness(job, model.profile)) for model in models]
    return _ranked([one for one in both if one[1].same or one[1].part >= LEAST_LIKENESS])


def of_script(words: Sequence[str], models: Iterable[StoredModel]) -> Ranked:
    """Return the models of a script, those with the most similar arguments first.

    Without a measurement, arguments are all that is known of a job, so no similarity is too small.
    """
    name, arguments = Path(words[0]).name, tuple(words[1:])
    found = list[tuple[StoredModel, JobLikeness]]()
    for model in models:
        stored = words_of(model.profile)
        if stored and stored[0] == name and model.profile.devices:
            same = stored[1:] == arguments
            part = 1.0 if same else SequenceMatcher(None, stored[1:], arguments).ratio()
            why = f"{'the same' if same else 'the'} command {model.profile.script}"
            found.append((model, JobLikeness(same, part, why)))
    return _ranked(found)


def _ranked(found: Iterable[tuple[StoredModel, JobLikeness]]) -> Ranked:
    newest = sorted(found, key=lambda one: one[0].profile.made_on, reverse=True)
    return tuple(sorted(newest, key=lambda one: (one[1].same, one[1].part), reverse=True))
