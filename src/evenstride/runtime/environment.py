"""The door through which the settings of a `Stride` come in from environment variables.

An explicit argument always wins, except over ``EVENSTRIDE_CHECKPOINTS``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evenstride.errors import ConfigError

USUAL_SILENT_S = 30.0


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment asks of a run."""

    policy: str | None = None  # `EVENSTRIDE_POLICY`, a policy's specification
    # `EVENSTRIDE_MAX_STEPS`; after so many steps the pass over the training loader ends, and the
    # next pass ends the program.
    max_steps: int | None = None
    # `EVENSTRIDE_TRACE`, a folder or a `.jsonl` file the leader writes to.
    trace: Path | None = None
    # `_EVENSTRIDE_PROGRESS`, a file that always holds the leader's step count.
    progress: Path | None = None
    # `EVENSTRIDE_CALIBRATE`, as `lab` sets it to measure a script's true curve.
    calibrate: str | None = None
    world_size: int = 1  # `WORLD_SIZE` as launchers set it; 1 without
    # `EVENSTRIDE_NOTICES`, where to look for notices that this machine will go.
    notices: str | None = None
    # `EVENSTRIDE_SILENT_S`, or 30 s: a rank whose heart stops for so long while a step waits for it
    # is lost. `None` where no elastic launcher starts ranks again.
    silent_s: float | None = None
    sync: str | None = None  # `EVENSTRIDE_SYNC`, a mode of synchronisation
    # `EVENSTRIDE_NOISE`; the noise of every so-many-th step's gradient is measured, of none if it
    # is 0.
    noise_every: int | None = None
    # `EVENSTRIDE_GLOBAL_BATCH`, for a `Stride` that leaves its batch open; 0 for `low`, the lower
    # bound.
    global_batch: int | None = None
    # `_EVENSTRIDE_HAND_OVER`, a folder over which this run takes over from another one, or hands
    # over to one; as `evenstride plan --online` sets it.
    hand_over: Path | None = None
    sinks: str = ""  # `EVENSTRIDE_SINKS`, where to tell what is known, with commas between
    # `EVENSTRIDE_ALERT_BELOW`, the part of its best speed below which a worker is named.
    alert_below: float | None = None
    # `EVENSTRIDE_CHECKPOINTS`, a folder that replaces that of every `Checkpointer`, whose own
    # folder is then not read or changed; as `lab`, `profile` and `plan --online` set it.
    checkpoints: Path | None = None
    # `EVENSTRIDE_RESTORE`; with 1, a run whose checkpoints go to `checkpoints` starts from the
    # newest one in the script's own folder, which is only read.
    restore: bool = False
    # `CUDA_DEVICE_MAX_CONNECTIONS`, the hardware queues of a CUDA device.
    connections: int | None = None


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Return the settings found in ``variables``, checked; empty ones count as absent."""
    max_steps = _count(variables, "EVENSTRIDE_MAX_STEPS", least=0)
    world_size = _count(variables, "WORLD_SIZE", least=1)
    trace, progress = variables.get("EVENSTRIDE_TRACE"), variables.get("_EVENSTRIDE_PROGRESS")
    hand_over = variables.get("_EVENSTRIDE_HAND_OVER")
    return Environment(
        policy=variables.get("EVENSTRIDE_POLICY") or None,
        sync=variables.get("EVENSTRIDE_SYNC") or None,
        max_steps=max_steps,
        trace=Path(trace) if trace else None,
        progress=Path(progress) if progress else None,
        calibrate=variables.get("EVENSTRIDE_CALIBRATE") or None,
        world_size=1 if world_size is None else world_size,
        notices=variables.get("EVENSTRIDE_NOTICES") or None,
        silent_s=_silent_s(variables),
        noise_every=_count(variables, "EVENSTRIDE_NOISE", least=0),
        global_batch=_batch(variables),
        hand_over=Path(hand_over) if hand_over else None,
        sinks=variables.get("EVENSTRIDE_SINKS", ""),
        alert_below=_part(variables, "EVENSTRIDE_ALERT_BELOW"),
        connections=_connections(variables),
        checkpoints=_checkpoints(variables),
        restore=_switch(variables, "EVENSTRIDE_RESTORE"),
    )


def _connections(variables: Mapping[str, str]) -> int | None:
    text = variables.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip()
    return int(text) if re.fullmatch(r"[0-9]+", text) else None  # CUDA's own, so not ours to refuse


def _silent_s(variables: Mapping[str, str]) -> float | None:
    if not variables.get("TORCHELASTIC_RUN_ID"):
        return None
    text = variables.get("EVENSTRIDE_SILENT_S") or str(USUAL_SILENT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 1.0 <= seconds < float("inf"):
        raise ConfigError(
            f"EVENSTRIDE_SILENT_S is {text!r}; it must be a number of seconds of at least 1; "
            f"leave it out for {USUAL_SILENT_S:.0f}"
        )
    return seconds


def _batch(variables: Mapping[str, str]) -> int | None:
    name = "EVENSTRIDE_GLOBAL_BATCH"
    text = variables.get(name, "").strip()
    if text == "low":
        return 0
    if text and not (re.fullmatch(r"[0-9]+", text) and int(text)):
        raise ConfigError(
            f"{name} is {text!r}; it must be a whole number of at least 1, or low, the lower bound"
        )
    return int(text) if text else None


def _checkpoints(variables: Mapping[str, str]) -> Path | None:
    text = variables.get("EVENSTRIDE_CHECKPOINTS", "")
    if "://" in text:
        raise ConfigError(
            f"EVENSTRIDE_CHECKPOINTS is {text!r}, a URL; give a path of the file system"
        )
    return Path(text).expanduser().absolute() if text else None


def _switch(variables: Mapping[str, str], name: str) -> bool:
    text = variables.get(name, "").strip()
    if text not in ("", "0", "1"):
        raise ConfigError(f"{name} is {text!r}; it must be 0 or 1")
    return text == "1"


def _count(variables: Mapping[str, str], name: str, *, least: int) -> int | None:
    text = variables.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"\s*[0-9]+\s*", text) or int(text) < least:
        raise ConfigError(f"{name} is {text!r}; it must be a whole number of at least {least}")
    return int(text)


def _part(variables: Mapping[str, str], name: str) -> float | None:
    text = variables.get(name, "")
    if not text:
        return None
    try:
        part = float(text)
    except ValueError:
        part = -1.0
    if not 0 <= part < 1:
        raise ConfigError(
            f"{name} is {text!r}; it must be a number from 0 (never) up to, not including, 1"
        )
    return part
