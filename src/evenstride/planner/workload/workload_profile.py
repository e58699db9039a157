"""A measured workload: what a plan knows about the training run.

A *profile* is a JSON file. It holds the model's size, step times of some batch sizes on one or
several types of machine, the noise of the gradients, and runs that reached their target, as far as
each was measured. Profiles of the same workload on different machines can be merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evenstride.errors import ConfigError

FORMAT = 1

_T = TypeVar("_T")

_Seconds = Annotated[float, Field(gt=0, le=1e6)]
_Count = Annotated[int, Field(ge=1, le=10**12)]
_Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Point(_Plain):
    """Steps of one batch size on a single worker."""

    samples: _Count  # in each step
    step_s: _Seconds  # mean seconds of a step
    # Relative standard deviation of a step; if steps are not normal, that of normal ones whose last
    # one is as late
    scatter: Annotated[float, Field(ge=0, le=100)] = 0.0
    steps: _Count = 1  # number of measured steps
    # Relative standard deviation of the mean of later steps, from the scatter of blocks of steps; 0
    # if not known
    drift: Annotated[float, Field(ge=0, le=100)] = 0.0


class DeviceProfile(_Plain):
    """One type of machine, and the steps of one of its workers."""

    type: _Name  # as a catalogue names it, or any name of the user's own
    device: str = ""  # the maker's name of the accelerator; empty for a processor, or if not known
    # Device of the model's parameters: ``cpu`` or ``cuda``; empty if not known
    computed_on: Literal["", "cpu", "cuda"] = ""
    points: tuple[Point, ...] = Field(min_length=1)  # steps of several sizes
    # That fit into a worker's memory; ``None`` if no limit was reached
    most_samples: _Count | None = None


class MeasuredCluster(_Plain):
    """Steps of several workers together, at one global batch."""

    types: tuple[_Name, ...] = Field(min_length=1)  # of the machine of each worker
    batch: _Count  # global, in samples
    step_s: _Seconds  # mean, with the work between steps
    # Relative standard deviation of the mean of later steps
    drift: Annotated[float, Field(ge=0, le=100)] = 0.0


class Model(_Plain):
    """The trained model."""

    parameters: _Count
    gradient_bytes: Annotated[float, Field(ge=0, le=1e15)]
    digest: str = ""


class Links(_Plain):
    """The links between workers, as measured."""

    latency_s: Annotated[float, Field(ge=0, le=1e3)]
    bytes_per_s: Annotated[float, Field(gt=0, le=1e18)] | None = None


class Noise(_Plain):
    """The noise scale of the gradient: samples at which it is as noisy as it is large."""

    scale: Annotated[float, Field(ge=0)]  # in samples
    low: Annotated[float, Field(ge=0)] = 0.0  # lower end of its 95 % interval
    high: Annotated[float, Field(ge=0)] | None = None  # upper end; ``None`` if unbounded
    # Whether it no longer changed; ``None`` for the mean of a whole training, or if not known
    settled: bool | None = None


class ReachedTraining(_Plain):
    """A run that reached its target."""

    batch: _Count  # global batch in samples
    epochs: Annotated[float, Field(gt=0, le=1e9)]  # until then
    # Its gradients' normalised gain, from 0 to 1; ``None`` if it was not measured
    gamma: Annotated[float, Field(gt=0, le=1.5)] | None = None


class WorkloadProfile(_Plain):
    """The measurements of a workload."""

    format: int = FORMAT
    evenstride: str  # version that measured it.
    torch: str  # version that it ran with.
    made_on: str
    script: str = ""  # command line of the script, in shell syntax; empty if not known.
    model: Model  # the trained model.
    samples: _Count  # of an epoch.
    global_batch: _Count  # of the script.
    # Steps on each type of machine; empty for a run whose times do not count.
    devices: tuple[DeviceProfile, ...] = ()
    clusters: tuple[MeasuredCluster, ...] = ()  # that were trained as a whole.
    links: Links | None = None  # between workers, if measured.
    noise: Noise | None = None  # of the gradient, if measured.
    trainings: tuple[ReachedTraining, ...] = ()  # that reached their target.
    target: str = ""  # that they reached, such as ``loss 0.35``; empty if there was none.
    # Seconds of an epoch beyond its steps, such as evaluation; ``None`` if no whole epoch was
    # measured.
    beside_s: Annotated[float, Field(ge=0, le=1e9)] | None = None


def read_profile(path: Path) -> WorkloadProfile:
    """Return the profile in a file."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(
            f"{path} is not a profile: it is not JSON; create one with evenstride profile"
        ) from None
    return profile_of(plain, str(path))


def profile_of(plain: Any, source: str) -> WorkloadProfile:
    """Return the profile in JSON types, or raise a `ConfigError`."""
    version = plain.get("format") if isinstance(plain, dict) else None
    if not isinstance(version, int) or version != FORMAT:
        raise ConfigError(
            f"{source} is not a profile of format {FORMAT} (its format is {version!r}); measure it "
            "again with evenstride profile"
        )
    try:
        return WorkloadProfile.model_validate(plain)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{source} is not a valid profile: {field or 'it'}: {first['msg']}; use the original "
            "file of evenstride profile, or measure again"
        ) from None


def write_profile(profile: WorkloadProfile, path: Path) -> None:
    """Write a profile as a JSON file, or raise a `ConfigError`; creates its folder if needed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def merged(profiles: Sequence[WorkloadProfile], *, force: bool = False) -> WorkloadProfile:
    """Return one profile of the same workload from several.

    Devices of one type are merged point by point, later profiles last. Links and noise are
    the last measured ones; runs that reached a target are those of all. The batch is that of the
    first profile with times: a run without times has noise and links at its own batch. ``force``
    merges profiles that differ in model, data or torch.
    """
    first = next((one for one in profiles if one.devices), profiles[0])
    require_same(profiles, force=force)
    if not force:
        _require_same_target(profiles)
    if not any(one.devices for one in profiles):
        raise ConfigError(
            "step times are not known: none of the profiles has a device; measure one with "
            "evenstride profile, or give the names of a run's machines with --as"
        )
    return first.model_copy(
        update={
            "devices": _devices(device for one in profiles for device in one.devices),
            "clusters": tuple(cluster for one in profiles for cluster in one.clusters),
            "links": _last(one.links for one in profiles),
            "noise": _last(one.noise for one in profiles),
            "trainings": tuple(training for one in profiles for training in one.trainings),
            "target": _last(one.target or None for one in profiles) or "",
            "script": next((one.script for one in profiles if one.script), ""),
            "beside_s": _last(one.beside_s for one in profiles),
        }
    )


def surest(measured: Sequence[Noise | None]) -> Noise | None:
    """Return the noise scale with the narrowest interval, settled ones first; may be ``None``."""

    def width(one: Noise) -> tuple[bool, float]:
        high = inf if one.high is None else one.high
        return one.settled is False, (high - one.low) / one.scale if one.scale > 0 else inf

    return min((one for one in measured if one is not None), key=width, default=None)


def require_versions(
    profile: WorkloadProfile, evenstride: str, torch: str, *, force: bool = False
) -> None:
    """Raise a `ConfigError` if a profile has another minor version, whose times may differ."""
    for name, was, now in (
        ("evenstride", profile.evenstride, evenstride),
        ("torch", profile.torch, torch),
    ):
        if now and _minor(was) != _minor(now) and not force:
            raise ConfigError(
                f"the profile was measured with {name} {was}, but {now} is installed, so its times "
                "may differ; measure it again with evenstride profile, or use --force"
            )


def require_same(profiles: Sequence[WorkloadProfile], *, force: bool = False) -> None:
    """Raise a `ConfigError` unless profiles have the same model, data and torch."""
    first = profiles[0]
    for other in () if force else profiles[1:]:
        for what, mine, theirs in (
            ("models", first.model.digest, other.model.digest),
            ("numbers of parameters", first.model.parameters, other.model.parameters),
            ("samples per epoch", first.samples, other.samples),
            ("versions of torch", _minor(first.torch), _minor(other.torch)),
        ):
            if mine != theirs:
                raise ConfigError(
                    f"the profiles of {first.made_on} and {other.made_on} have different {what} "
                    f"({mine} and {theirs}), so their workloads differ; plan for one of "
                    "them, or use --force"
                )


def _require_same_target(profiles: Sequence[WorkloadProfile]) -> None:
    targets = sorted({one.target for one in profiles if one.target})
    if len(targets) > 1:
        raise ConfigError(
            f"the runs reached different targets ({' and '.join(targets)}), so their epochs "
            "cannot be compared; record the same metric in all of them, leave some out, or use "
            "--force"
        )


def _devices(devices: Iterable[DeviceProfile]) -> tuple[DeviceProfile, ...]:
    found: dict[str, DeviceProfile] = {}
    for device in devices:
        before = found.get(device.type)
        if before is None:
            found[device.type] = device
            continue
        limits = [d.most_samples for d in (before, device) if d.most_samples is not None]
        found[device.type] = device.model_copy(
            update={
                "points": before.points + device.points,
                "most_samples": min(limits, default=None),
            }
        )
    return tuple(found.values())


def _last(values: Iterable[_T | None]) -> _T | None:
    found = [value for value in values if value is not None]
    return found[-1] if found else None


def _minor(version: str) -> str:
    return ".".join(version.partition("+")[0].split(".")[:2])
