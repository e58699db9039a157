"""Before the first save: all ranks compare their settings, and try the folder."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import time
import uuid
from dataclasses import dataclass, replace
from typing import Any

from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint.format.retention import next_generation
from evenstride.runtime.checkpoint.format.storage import Storage, open_storage
from evenstride.runtime.checkpoint.restore.saved_state import (
    SavedObjects,
    collect_others,
    training_of,
)
from evenstride.runtime.checkpoint.run_binding import RunBinding
from evenstride.runtime.checkpoint.save.save_interval import SaveInterval, parse_every
from evenstride.runtime.checkpoint.save.saver import told
from evenstride.runtime.checkpoint.trial_folder import redirect_of
from evenstride.runtime.coordination.agreement import Plain, require_equal
from evenstride.runtime.environment import Environment

logger = logging.getLogger("evenstride")


@dataclass(frozen=True, slots=True)
class CheckpointerArguments:
    """What a user gave a `Checkpointer`, and the environment that it is made in."""

    folder: str | os.PathLike[str]
    every: Any
    keep: Any
    model: Any
    optimizer: Any
    scheduler: Any
    extra: Any
    environment: Environment


@dataclass(frozen=True, slots=True)
class Prepared:
    """What all ranks have agreed on.

    Args:
        storage: of the folder.
        cadence: of the saves.
        training: what is saved.
        generation: of this run: hexadecimal digits, more than those of any run before.
        source: of the folder that a run without checkpoints starts from; ``None`` for none.
    """

    storage: Storage
    cadence: SaveInterval
    training: SavedObjects
    generation: str
    source: Storage | None = None


def prepare(asked: CheckpointerArguments, ties: RunBinding) -> Prepared:
    """Check what was asked, alike on every rank, and try to write to the folder; collective.

    A folder that cannot be written yet is a warning: it may have been repaired when the first
    save is due.

    Raises:
        ConfigError: what was asked cannot be.
        RanksDisagree: the ranks were given different settings.
    """
    # `agree` passes JSON only, so the objects are handed out past it.
    made: list[Prepared] = []
    token = uuid.uuid4().hex

    def show() -> Plain:
        made.append(_checked(asked))
        names = [key for key, _ in made[0].training.others()]
        settings = {
            "every": str(made[0].cadence),
            "keep": asked.keep,
            "states": names,
            "EVENSTRIDE_CHECKPOINTS": str(asked.environment.checkpoints or ""),
            "EVENSTRIDE_RESTORE": asked.environment.restore,
        }
        return {"asked": settings, **_probe(made[0].storage, token)}

    def judge(shown: list[Plain]) -> Plain:
        require_equal([mine["asked"] for mine in shown], "Checkpointer()")
        redirect_of(asked.folder, asked.environment).tell()
        _tell_of_problems(made[0].storage, shown)
        return {"generation": _generation(made[0].storage)}

    try:
        generation = ties.agree("Checkpointer()", show, judge)["generation"]
    # Only after the agreement, in which the leader looks for the probes of all ranks.
    finally:
        if made:
            with contextlib.suppress(Exception):
                made[0].storage.delete(_probe_name(token))
    return replace(made[0], generation=generation)


def _checked(asked: CheckpointerArguments) -> Prepared:
    cadence = parse_every(asked.every)
    if not isinstance(asked.keep, int) or isinstance(asked.keep, bool) or asked.keep < 1:
        raise ConfigError(
            f"keep={asked.keep!r} checkpoints cannot be kept; give a whole number of at least 1"
        )
    training = training_of(asked.model, asked.optimizer, asked.scheduler, asked.extra)
    if any("/" in name for name in training.extra):
        raise ConfigError(
            f"extra has the names {sorted(training.extra)}; they are parts of paths, so use "
            "others, without '/'"
        )
    _refuse_closures(training)
    # The result is not needed; what cannot be packed is refused now, not at the first save.
    collect_others(training)
    redirect = redirect_of(asked.folder, asked.environment)
    source = open_storage(redirect.source) if redirect.source else None
    return Prepared(open_storage(redirect.folder), cadence, training, "", source)


def _refuse_closures(training: SavedObjects) -> None:
    """Refuse optimizers whose state torch cannot make anew: it takes a step without a closure."""
    for optimizer in training.optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{type(optimizer).__name__} needs a closure for each step, so torch cannot "
                "restore its state; use another optimizer, or save it by hand (guide, checkpoints)"
            )


def _generation(storage: Storage) -> str:
    now_s, drawn = time.time(), uuid.uuid4().int % 2**16
    try:
        return next_generation(storage, now_s, drawn)
    except Exception:  # the folder cannot be listed, which every save will tell
        return f"{int(now_s):08x}{drawn:04x}"


def _probe_name(token: str) -> str:
    return f"probe-{token}"


def _probe(storage: Storage, token: str) -> Plain:
    """Write a small file; the leader then looks whether it sees those of all ranks."""
    try:
        storage.write(_probe_name(token), [b"evenstride\n"])
    except Exception as error:
        return {"token": token, "problem": told(error)}
    return {"token": token, "problem": ""}


def _tell_of_problems(storage: Storage, shown: list[Plain]) -> None:
    for rank, mine in enumerate(shown):
        if mine["problem"]:
            logger.warning(
                "rank %d cannot write checkpoints to %s: %s; training goes on, and every save is "
                "tried; make the folder writable",
                rank,
                storage,
                mine["problem"],
            )
            return
    unseen = []
    for rank, mine in enumerate(shown):
        with contextlib.suppress(Exception):
            if not storage.exists(_probe_name(mine["token"])):
                unseen.append(rank)
    if unseen:
        logger.warning(
            "what rank %d wrote to %s is not seen by rank 0, so checkpoints would be in parts on "
            "several disks; give a folder that all ranks share",
            unseen[0],
            storage,
        )
