"""What a script forgot to restore or to save: warnings that name the line of the `Checkpointer`."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterable, Iterator

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evenstride.runtime.checkpoint.format.retention import attempts
from evenstride.runtime.checkpoint.format.storage import Storage
from evenstride.runtime.checkpoint.restore.saved_state import SavedObjects

logger = logging.getLogger("evenstride")

# How deep a scheduler may be inside what is saved: Accelerate's has torch's, which has others.
_DEPTH = 3


def tell_if_unrestored(storage: Storage, generation: str, line: str) -> None:
    """Warn if a folder has checkpoints of an earlier run, which this one has not restored.

    Args:
        storage: of the folder.
        generation: of this run.
        line: where its `Checkpointer` was made.
    """
    with contextlib.suppress(Exception):  # a folder that cannot be listed fails at the save
        complete, _ = attempts(storage)
        earlier = [name for name in complete if name.generation != generation]
        if earlier:
            logger.warning(
                "%s has checkpoints of an earlier run, the newest %s, but restore() was not called "
                "before the first step, so this run starts from scratch. Call "
                "checkpoint.restore() after %s, or choose another folder",
                storage,
                earlier[0],
                line,
            )


def tell_if_unsaved(training: SavedObjects, line: str) -> None:
    """Warn if an optimizer has a learning-rate scheduler that is not saved with it.

    Looks for one among all objects, which takes tens of milliseconds, unless it is saved.
    """
    saved = [scheduler for _, each in training.others() for scheduler in _within(each, _DEPTH)]
    covered = {id(scheduler.optimizer) for scheduler in saved}
    for optimizer in training.optimizers:
        if id(optimizer) not in covered and (kind := _scheduled_by(optimizer)):
            logger.warning(
                "the %s of an optimizer is not saved, so a restored run would start its schedule "
                "again. Give it to the Checkpointer at %s: scheduler=scheduler",
                kind,
                line,
            )
            return


def _scheduled_by(optimizer: Optimizer) -> str:
    """Return the kind of an optimizer's scheduler; empty if it has none."""
    for one in gc.get_referrers(optimizer):
        # An object's attributes may be a dictionary of their own. So are a script's variables.
        owners = gc.get_referrers(one) if type(one) is dict and "last_epoch" in one else [one]
        for owner in owners:
            if issubclass(type(owner), LRScheduler) and vars(owner).get("optimizer") is optimizer:
                return type(owner).__name__
    return ""


def _within(each: object, depth: int) -> Iterator[LRScheduler]:
    """Yield the schedulers that an object is or holds."""
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
