"""Copying a rank's part of the run aside, as a job for the thread that writes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from evenstride._version import __version__
from evenstride.errors import EvenstrideError
from evenstride.runtime.checkpoint.checkpoint_errors import CheckpointError
from evenstride.runtime.checkpoint.format.manifest import FORMAT, Manifest, Name
from evenstride.runtime.checkpoint.format.state_codec import pack, to_bytes
from evenstride.runtime.checkpoint.restore.rng_state import capture
from evenstride.runtime.checkpoint.restore.saved_state import (
    RANDOM,
    Collected,
    SavedObjects,
    collect,
)
from evenstride.runtime.checkpoint.run_binding import RunBinding
from evenstride.runtime.checkpoint.save.checkpoint_writer import SaveJob
from evenstride.runtime.checkpoint.save.saver import told
from evenstride.runtime.checkpoint.save.staging import Staging
from evenstride.runtime.checkpoint.save.write_ownership import Sources, pieces_of


@dataclass(frozen=True, slots=True)
class About:
    """What a manifest says of the run; of the leader's alone.

    Args:
        stride: the `Stride`'s own state.
        data: what the data set is like.
        workers: what is known of the workers.
        earlier: checkpoints that the same training run wrote before its last restart.
        run: identifies the training run.
    """

    stride: dict[str, Any]
    data: dict[str, Any]
    workers: dict[str, Any]
    earlier: tuple[str, ...] = ()
    run: str = ""


def copy_part(
    name: Name,
    training: SavedObjects,
    about: About,
    ties: RunBinding,
    staging: Staging,
) -> SaveJob:
    """Return this rank's part of a save, copied.

    What goes wrong is part of the job, so that all ranks hear of it when it is written.

    Args:
        name: of the attempt.
        training: what is saved.
        about: what the manifest says of the run.
        ties: of this rank.
        staging: to copy into.
    """
    versions = {"evenstride": __version__, "torch": str(torch.__version__)}
    world_size, now_s = ties.world_size, time.time()
    manifest = Manifest(
        FORMAT,
        name.step,
        now_s,
        world_size,
        versions,
        about.stride,
        about.data,
        about.workers,
        {},
        about.earlier,
        about.run,
    )
    error: EvenstrideError | None = None
    try:
        found = collect(training)
        staged = staging.copy(pieces_of(found.sources, ties.rank, world_size))
        items = {key: to_bytes(value) for key, value in found.items.items() if ties.rank == 0}
        # The one item that differs from rank to rank, so each writes its own.
        own = f"{RANDOM}/{ties.rank}"
        items[own] = to_bytes(pack(capture(training.device), own, {}))
    except Exception as failure:
        error = failure if isinstance(failure, EvenstrideError) else _ours(failure)
        found, items, staged = Collected(Sources({}, {}), {}), {}, staging.copy([])
    return SaveJob(name, ties.rank, staged, items, found.sources.outline(), manifest, error)


def _ours(failure: Exception) -> CheckpointError:
    return CheckpointError(f"the state could not be copied: {told(failure)}")
