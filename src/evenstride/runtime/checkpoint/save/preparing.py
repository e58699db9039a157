"""Checks and compares the arguments of all ranks, and tests the folder, before the first save.

Also warns if a script forgot to restore a checkpoint or to save a scheduler.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.core.spec import duration_s
from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint.format.retention import attempts, next_generation
from evenstride.runtime.checkpoint.format.storage import (
    PatientReader,
    Storage,
    location,
    open_storage,
)
from evenstride.runtime.checkpoint.restore.saved_state import (
    SavedObjects,
    collect_others,
    training_of,
)
from evenstride.runtime.checkpoint.run_binding import RunBinding
from evenstride.runtime.checkpoint.save.save_job import one_line
from evenstride.runtime.coordination.agreement import Plain, require_equal
from evenstride.runtime.environment import Environment
from evenstride.runtime.trial import note, sentence

logger = logging.getLogger("evenstride")

_LONGEST_NAME = 40
# How deep a scheduler may be nested in a saved object: Accelerate's wraps torch's, for example.
_DEPTH = 3
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """The interval between saves: in steps, in seconds, or computed."""

    steps: int = 0  # 0 if the interval is a time
    interval_s: float = 0.0  # by the leader's clock; 0 if the interval is in steps
    auto: bool = False  # whether the interval follows from the cost of a save
    saving: Saving | None = None  # how it is computed; `None` for the default

    def __str__(self) -> str:
        """Return a readable text, equal on all ranks if and only if their settings are equal.

        The default ``repr`` of a user's object shows its address, which differs between ranks. So
        the address is left out.
        """
        if self.auto:
            return f"auto, by {_ADDRESS.sub('', repr(self.saving))}" if self.saving else "auto"
        if self.steps:
            return "every step" if self.steps == 1 else f"every {self.steps} steps"
        return f"every {repr(self.interval_s).removesuffix('.0')} s"

    def after(self, step: int) -> float:
        """Return the next step at which a save is due; infinity if the interval is a time."""
        return (step // self.steps + 1) * self.steps if self.steps else math.inf

    @property
    def by_clock(self) -> bool:
        """Whether saves are due by a clock."""
        return not self.steps


def parse_every(every: Any) -> SaveInterval:
    """Return the interval for a user's ``every``."""
    if every == "auto":
        return SaveInterval(auto=True)
    if isinstance(every, Saving):
        return SaveInterval(auto=True, saving=every)
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return SaveInterval(steps=every)
    if isinstance(every, timedelta) and every > timedelta():
        return SaveInterval(interval_s=every.total_seconds())
    interval_s = duration_s(every) if isinstance(every, str) else None
    if interval_s:
        return SaveInterval(interval_s=interval_s)
    raise ConfigError(
        f"invalid value every={every!r}: expected a number of steps of at least 1, a duration such "
        'as "30s", "5min" or a timedelta, "auto", or a Saving'
    )


@dataclass(frozen=True, slots=True)
class TrialFolder:
    """The folder for checkpoints, and another one from which the first may be restored."""

    folder: str
    replaced: str = ""  # the script's folder, if `folder` replaces it
    source: str = ""  # the script's folder, if a run without checkpoints starts from it; only read

    def announce(self) -> None:
        """Log the folder if it is not the script's (one rank only)."""
        if not self.replaced:
            return
        read = bool(self.source)
        logger.warning("%s", sentence(self.folder, self.replaced, read=read))
        what = {"folder": self.folder, "replaced": self.replaced, "read": read}
        note(Path(self.folder).parent, what)


def redirect_of(folder: str | os.PathLike[str], environment: Environment) -> TrialFolder:
    """Return the folder for a script's checkpoints; a trial run has its own."""
    theirs = location(folder)
    if environment.checkpoints is None:
        return TrialFolder(theirs)
    own = environment.checkpoints / _name(theirs)
    return TrialFolder(str(own), theirs, theirs if environment.restore else "")


def _name(folder: str) -> str:
    """Return a readable, unique name for a folder."""
    # Folders with different parents may have the same name, so a digest of the path is added.
    last = re.sub(r"[^\w.=+-]+", "-", PurePosixPath(folder).name)[-_LONGEST_NAME:]
    return f"{last or 'checkpoints'}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class CheckpointerArguments:
    """The arguments of a `Checkpointer`, and its environment."""

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
    """The settings on which all ranks have agreed."""

    storage: Storage
    cadence: SaveInterval
    training: SavedObjects
    generation: str  # of this run: a hexadecimal number, larger than that of any earlier run
    source: PatientReader | None = None  # from which a run without checkpoints starts

    @property
    def reader(self) -> PatientReader:
        """The storage from which checkpoints are restored."""
        return PatientReader(self.storage)


def prepare(asked: CheckpointerArguments, ties: RunBinding) -> Prepared:
    """Check that the arguments are valid and equal on all ranks, and test the folder; collective.

    A folder that cannot be written only causes a warning, because it may be writable when the first
    save is due.
    """
    # `agree` passes only JSON, so the objects are returned through this list.
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
        redirect_of(asked.folder, asked.environment).announce()
        _warn_of_problems(made[0].storage, shown)
        return {"generation": _generation(made[0].storage)}

    try:
        generation = ties.agree("Checkpointer()", show, judge)["generation"]
    # Only after the agreement, in which the leader checks the probes of all ranks.
    finally:
        if made:
            with contextlib.suppress(Exception):
                made[0].storage.delete(_probe_name(token))
    return replace(made[0], generation=generation)


def _checked(asked: CheckpointerArguments) -> Prepared:
    cadence = parse_every(asked.every)
    if not isinstance(asked.keep, int) or isinstance(asked.keep, bool) or asked.keep < 1:
        raise ConfigError(f"invalid value keep={asked.keep!r}: expected an integer of at least 1")
    training = training_of(asked.model, asked.optimizer, asked.scheduler, asked.extra)
    if any("/" in name for name in training.extra):
        raise ConfigError(
            f"extra has the names {sorted(training.extra)}; names must not contain '/', because "
            "they become parts of paths"
        )
    _refuse_closures(training)
    # The result is not used: an unsafe state is refused now instead of at the first save.
    collect_others(training)
    redirect = redirect_of(asked.folder, asked.environment)
    source = PatientReader(open_storage(redirect.source)) if redirect.source else None
    return Prepared(open_storage(redirect.folder), cadence, training, "", source)


def _refuse_closures(training: SavedObjects) -> None:
    """Refuse optimizers whose step needs a closure: torch cannot re-create their state."""
    for optimizer in training.optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{type(optimizer).__name__} needs a closure for each step, so torch cannot "
                "restore its state; use another optimizer, or save it yourself (guide, checkpoints)"
            )


def _generation(storage: Storage) -> str:
    now_s, drawn = time.time(), uuid.uuid4().int % 2**16
    try:
        return next_generation(storage, now_s, drawn)
    except Exception:  # the folder cannot be listed, which every save reports
        return f"{int(now_s):08x}{drawn:04x}"


def _probe_name(token: str) -> str:
    return f"probe-{token}"


def _probe(storage: Storage, token: str) -> Plain:
    """Write a small file; the leader then checks that it sees the files of all ranks."""
    try:
        storage.write(_probe_name(token), [b"evenstride\n"])
    except Exception as error:
        return {"token": token, "problem": one_line(error)}
    return {"token": token, "problem": ""}


def _warn_of_problems(storage: Storage, shown: list[Plain]) -> None:
    for rank, mine in enumerate(shown):
        if mine["problem"]:
            logger.warning(
                "rank %d cannot write checkpoints to %s: %s; training continues, and each save "
                "tries again; make the folder writable",
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
            "rank 0 does not see the file that rank %d wrote to %s, so checkpoints would be "
            "scattered over several disks; use a folder that all ranks share",
            unseen[0],
            storage,
        )


def warn_if_unrestored(storage: Storage, generation: str, line: str) -> None:
    """Warn if a folder has checkpoints of an earlier run, which this one has not restored.

    ``line`` is where the script created its `Checkpointer`.
    """
    with contextlib.suppress(Exception):  # if the folder cannot be listed, the save raises
        complete, _ = attempts(storage)
        earlier = [name for name in complete if name.generation != generation]
        if earlier:
            logger.warning(
                "%s has checkpoints of an earlier run (newest: %s), but restore() was not called "
                "before the first step, so this run starts from scratch. Call "
                "checkpoint.restore() after %s, or use another folder",
                storage,
                earlier[0],
                line,
            )


def warn_if_unsaved(training: SavedObjects, line: str) -> None:
    """Warn if an optimizer has a learning-rate scheduler that is not saved with it.

    If no scheduler is saved, it searches all Python objects, which takes tens of milliseconds.
    """
    saved = [scheduler for _, each in training.others() for scheduler in _within(each, _DEPTH)]
    covered = {id(scheduler.optimizer) for scheduler in saved}
    for optimizer in training.optimizers:
        if id(optimizer) not in covered and (kind := _scheduled_by(optimizer)):
            logger.warning(
                "the %s of an optimizer is not saved, so a restored run would start its schedule "
                "again. Pass it to the Checkpointer at %s: scheduler=scheduler",
                kind,
                line,
            )
            return


def _scheduled_by(optimizer: Optimizer) -> str:
    """Return the class name of an optimizer's scheduler; empty without one."""
    for one in gc.get_referrers(optimizer):
        # The referrer may be a dictionary of an object's attributes, or of a script's variables.
        owners = gc.get_referrers(one) if type(one) is dict and "last_epoch" in one else [one]
        for owner in owners:
            if issubclass(type(owner), LRScheduler) and vars(owner).get("optimizer") is optimizer:
                return type(owner).__name__
    return ""


def _within(each: object, depth: int) -> Iterator[LRScheduler]:
    """Yield the object if it is a scheduler, and the schedulers that it holds."""
    if isinstance(each, LRScheduler):
        yield each
    if not depth:
        return
    held: Iterable[object] = ()
    if isinstance(each, (list, tuple)):
        held = each
    elif isinstance(each, dict):
        held = each.values()
    elif hasattr(each, "__dict__"):
        held = vars(each).values()
    for one in held:
        if isinstance(one, (list, tuple, dict)) or hasattr(one, "__dict__"):
            yield from _within(one, depth - 1)
