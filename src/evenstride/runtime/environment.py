"""Reads the settings of a `Stride` from environment variables.

An explicit argument takes precedence, except over ``EVENSTRIDE_CHECKPOINTS``.
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
    """The settings in the environment of a run."""

    policy: str | None = None  # `EVENSTRIDE_POLICY`, specification of a policy
    # `EVENSTRIDE_MAX_STEPS`; after so many steps the pass over the training loader ends, and the
    # next pass ends the program.
    max_steps: int | None = None
    # `EVENSTRIDE_TRACE`, a folder or a `.jsonl` file that the leader writes.
    trace: Path | None = None
    # `_EVENSTRIDE_PROGRESS`, a file that always contains the leader's step count.
    progress: Path | None = None
    # `EVENSTRIDE_CALIBRATE`, set by `lab` to measure a script's step time as a function of share.
    calibrate: str | None = None
    world_size: int = 1  # `WORLD_SIZE`, set by launchers; 1 if unset
    # `EVENSTRIDE_NOTICES`, where to look for preemption notices for this machine.
    notices: str | None = None
    # `EVENSTRIDE_SILENT_S`, or 30 s. A rank that sends no heartbeat for so long, while a step waits
    # for it, is lost. `None` if no elastic launcher restarts ranks.
    silent_s: float | None = None
    sync: str | None = None  # `EVENSTRIDE_SYNC`, a synchronisation mode
    # `EVENSTRIDE_NOISE`, steps between two measurements of the gradient noise; 0 for none.
    noise_every: int | None = None
    # `EVENSTRIDE_GLOBAL_BATCH`, for a `Stride` with an open global batch; 0 stands for `low`, the
    # lower bound.
    global_batch: int | None = None
    # `_EVENSTRIDE_HAND_OVER`, a folder through which this run takes over from another run, or hands
    # over to one; set by `evenstride plan --online`.
    hand_over: Path | None = None
    sinks: str = ""  # `EVENSTRIDE_SINKS`, where to write metrics, separated by commas
    # `EVENSTRIDE_ALERT_BELOW`, fraction of its best speed below which the log names a worker.
    alert_below: float | None = None
    # `EVENSTRIDE_CHECKPOINTS`, a folder that replaces that of every `Checkpointer`, whose own
    # folder is then neither read nor changed; set by `lab`, `profile` and `plan --online`.
    checkpoints: Path | None = None
    # `EVENSTRIDE_RESTORE`; if 1, a run whose checkpoints go to `checkpoints` starts from the newest
    # one in the script's own folder, which is only read.
    restore: bool = False
    # `CUDA_DEVICE_MAX_CONNECTIONS`, number of hardware queues of a CUDA device.
    connections: int | None = None


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Return the checked settings in ``variables``; an empty variable counts as unset."""
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
    return int(text) if re.fullmatch(r"[0-9]+", text) else None  # CUDA checks it, not evenstride


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
            f"{name} is {text!r}; it must be a number of at least 0 (never) and less than 1"
        )
    return part
