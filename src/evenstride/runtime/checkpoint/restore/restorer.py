"""Finds the newest intact checkpoint, and checks whether this run may continue from it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from evenstride.core.sampling.partition import EpochCursor
from evenstride.errors import CheckpointDamaged, CheckpointError, ConfigError, EvenstrideError
from evenstride.runtime.checkpoint.format.manifest import (
    Manifest,
    Name,
    NotWhole,
    check_file,
    parse_name,
    read_manifest,
)
from evenstride.runtime.checkpoint.format.retention import COMPLETED, Lineage, attempts, descended
from evenstride.runtime.checkpoint.format.state_codec import unpack
from evenstride.runtime.checkpoint.format.storage import PatientReader
from evenstride.runtime.checkpoint.restore.checkpoint_reader import Reader, read
from evenstride.runtime.checkpoint.restore.saved_state import (
    RANDOM,
    SavedObjects,
    check_random,
    derive_random,
    restore_random,
    state_cleared_on_error,
)
from evenstride.runtime.checkpoint.restore.state_matching import (
    RestoreTargets,
    objects_in,
    put,
    targets_for,
)
from evenstride.runtime.checkpoint.run_binding import RunBinding
from evenstride.runtime.checkpoint.save.save_job import one_line
from evenstride.runtime.coordination.agreement import Plain

logger = logging.getLogger("evenstride")

ALLOWED = ("data", "global_batch", "seed")
# The most checkpoints that an error describes.
_FEW = 10
_NO_MANIFEST = "it has no manifest: the save did not finish, or the file was deleted"


@dataclass(frozen=True, slots=True)
class Restored:
    """The restored checkpoint.

    Args:
        step: the number of trained steps, over all restarts.
        folder: the checkpoint's subfolder in the folder of all checkpoints.
    """

    step: int
    folder: str


@dataclass(frozen=True, slots=True)
class _Standing:
    """The contents of the folder, newest first."""

    complete: list[Name]  # attempts with a manifest, which may be damaged
    begun: list[Name]  # attempts without
    completed: bool  # whether the folder is known to have held a complete checkpoint

    @property
    def all(self) -> list[Name]:
        return sorted([*self.complete, *self.begun], reverse=True)


@dataclass(frozen=True, slots=True)
class _Passed:
    """Why a checkpoint was skipped, and whether its save is known to have finished."""

    damage: str
    ended: bool


@dataclass(frozen=True, slots=True)
class Restorer:
    """Restores a run; every rank has one and makes the same calls."""

    storage: PatientReader
    ties: RunBinding
    group: dist.ProcessGroup | None  # of all ranks; `None` with one process
    training: SavedObjects
    data: dict[str, Any]  # description of the data set
    allow: frozenset[str]  # accepted differences

    def run(self) -> tuple[Restored | None, Lineage]:
        """Restore the newest intact checkpoint; ``None`` if no checkpoint was ever complete.

        Also return the checkpoints that the run may delete from now on.

        Raises:
            CheckpointDamaged: all are damaged, or one was not written by evenstride.
            CheckpointError: a file cannot be read; no state has changed.
        """
        there = self._find()
        passed: dict[Name, _Passed] = {}
        for name in there.all:
            manifest, why = None, _Passed(_NO_MANIFEST, ended=False)
            if name in there.complete:
                manifest, why = self._check(name)
            if not why.damage:
                assert manifest is not None, "a checkpoint without damage has a manifest"
                with state_cleared_on_error(self.training):
                    restored = self._load(name, manifest)
                lineage = descended(name, manifest, there.complete, passed.keys(), self.storage)
                return restored, lineage
            passed[name] = why
            if self.ties.rank == 0:
                logger.warning(
                    "checkpoint %s is skipped: %s. It is kept; delete it if you do not need it",
                    name,
                    why.damage,
                )
        # One unfinished manifest can be left by a first save that was killed; two mean damage.
        completed = there.completed or len(there.complete) > 1
        self._refuse_to_start_again(passed, completed=completed)
        if self.ties.rank == 0:
            self._log_start(len(passed), completed=there.completed)
        return None, Lineage()

    def _refuse_to_start_again(self, passed: dict[Name, _Passed], *, completed: bool) -> None:
        """Raise if a checkpoint was complete once and all are damaged now; list the damage."""
        if not passed or not (completed or any(why.ended for why in passed.values())):
            return
        reasons = [f"{name}: {why.damage}" for name, why in passed.items()]
        more = f"; and {len(reasons) - _FEW} more" if len(reasons) > _FEW else ""
        raise CheckpointDamaged(
            f"none of the {len(passed)} checkpoints in {self.storage} can be restored "
            f"({'; '.join(reasons[:_FEW])}{more}). No file was changed or deleted. Replace one by "
            "a backup copy; to start from scratch, use another folder"
        )

    def _log_start(self, unfinished: int, *, completed: bool) -> None:
        if unfinished:
            logger.warning(
                "no checkpoint in %s is complete (%d unfinished); training starts from scratch",
                self.storage,
                unfinished,
            )
        elif completed:
            logger.warning(
                "%s held complete checkpoints according to its %s, but has none now; training "
                "starts from scratch",
                self.storage,
                COMPLETED,
            )
        else:
            logger.info("no checkpoint in %s yet; training starts from scratch", self.storage)

    def _find(self) -> _Standing:
        """Return the contents of the folder, the same on every rank."""

        def show() -> Plain:
            unknown = sorted(self.allow - set(ALLOWED))
            if unknown:
                raise ConfigError(
                    f"restore(allow=...) got {', '.join(map(repr, unknown))}; expected one or more "
                    f"of {', '.join(ALLOWED)}"
                )
            return {}

        def judge(shown: list[Plain]) -> Plain:
            del shown
            complete, begun = attempts(self.storage)
            completed = COMPLETED in self.storage.list()
            lists = {"complete": list(map(str, complete)), "begun": list(map(str, begun))}
            return {**lists, "completed": completed}

        found = self.ties.agree("restore()", show, judge)
        complete, begun = (
            [name for text in found[kind] if (name := parse_name(text)) is not None]
            for kind in ("complete", "begun")
        )
        return _Standing(complete, begun, found["completed"])

    def _check(self, name: Name) -> tuple[Manifest | None, _Passed]:
        """Return a checkpoint's manifest, and the damage that any rank has found.

        Each rank reads a part of the files.
        """
        manifests: list[Manifest] = []

        def show() -> Plain:
            try:
                with _named(name, self.storage):
                    manifests.append(read_manifest(self.storage, name))
            except NotWhole as error:
                return {"damage": str(error), "ended": error.ended}
            self._adapted(manifests[0])  # refuses before the slow reads
            for file, info in self._mine(manifests[0]):
                damage = check_file(self.storage, name.file(file), info)
                if damage is not None:
                    return {"damage": damage, "ended": True}
            return {"damage": "", "ended": True}

        def judge(shown: list[Plain]) -> Plain:
            return next((mine for mine in shown if mine["damage"]), shown[0])

        found = self.ties.agree(f"restore() of {name}", show, judge)
        return (manifests[0] if manifests else None), _Passed(**found)

    def _mine(self, manifest: Manifest) -> list[tuple[str, Any]]:
        # Assigned from the largest on, so that ranks read about the same amount.
        files = sorted(manifest.files.items(), key=lambda item: (-item[1].size_bytes, item[0]))
        return files[self.ties.rank :: self.ties.world_size]

    def _load(self, name: Name, manifest: Manifest) -> Restored:
        reader = Reader(self.storage, name, manifest)
        run = self.ties.run
        before, targets = run.state_dict(), list[RestoreTargets]()
        random_states: list[Any] = []

        def show() -> Plain:
            with _named(name, self.storage):
                targets.append(targets_for(self.training, reader.read_metadata(), reader.item))
                random_states.append(self._random_state_of(reader))
            # Inside the agreement: if one rank refuses, no rank has overwritten a tensor.
            run.load_state_dict(self._adapted(manifest))
            return {}

        self.ties.agree(f"restore() from {name}", show, lambda shown: shown[0])
        metadata = reader.read_metadata()
        try:
            with self.ties.waiting():
                read(targets[0].tensors, reader, self.group)
            put(self.training, targets[0])
        except BaseException as error:
            run.load_state_dict(before)
            ours = isinstance(error, EvenstrideError)
            if ours or not isinstance(error, Exception | CheckpointException):
                raise
            raise CheckpointError(
                f"checkpoint {name} is intact, but could not be loaded: {one_line(error)}; parts "
                "of the model may have been overwritten"
            ) from error
        self._warn_of_unrestored(metadata)
        self._restore_random_state(random_states[0], manifest.step)
        self.ties.recall(manifest.workers)
        if self.ties.rank == 0:
            logger.info(
                "restored step %d from %s, saved by %d rank(s), on %d rank(s)",
                manifest.step,
                name,
                manifest.world_size,
                self.ties.world_size,
            )
        return Restored(manifest.step, str(name))

    def _adapted(self, manifest: Manifest) -> dict[str, Any]:
        return adapted(manifest, self.ties.run.state_dict(), self.data, self.allow)

    def _warn_of_unrestored(self, metadata: Metadata) -> None:
        """Warn of saved objects that this run's `Checkpointer` did not get."""
        given = {key for key, _ in self.training.others()}
        rest = [key for key in objects_in(metadata) if key not in given]
        if rest and self.ties.rank == 0:
            logger.warning(
                "the checkpoint also has %s, which was not passed to this Checkpointer; it is not "
                "restored, and further checkpoints will not contain it",
                ", ".join(rest),
            )

    def _random_state_of(self, reader: Reader) -> Any:
        """Return the saved state of this rank's random generators; ``None`` for a new rank."""
        own = f"{RANDOM}/{self.ties.rank}"
        if MetadataIndex(own) not in reader.read_metadata().storage_data:
            return None
        state = unpack(reader.item(own), {})
        check_random(state, self.training.device)
        return state

    def _restore_random_state(self, state: Any, step: int) -> None:
        if state is None:
            derive_random(self.ties.run.state_dict()["seed"], step, self.ties.rank)
        else:
            restore_random(state, self.training.device)


@contextlib.contextmanager
def _named(name: Name, storage: PatientReader) -> Iterator[None]:
    """Add the checkpoint's name and a remedy to errors about foreign content."""
    try:
        yield
    except NotWhole:
        raise
    except CheckpointDamaged as error:
        raise CheckpointDamaged(
            f"checkpoint {name} has correct digests, but was not written by evenstride: {error}. "
            f"No state was changed. Find out which program writes to {storage}; to continue from "
            "the previous checkpoint, move this one to another folder"
        ) from error


def adapted(
    manifest: Manifest, own: dict[str, Any], data: dict[str, Any], allow: Collection[str]
) -> dict[str, Any]:
    """Return a checkpoint's position in the data, adapted to this run.

    ``own`` is the position of this run, and ``data`` describes its data set.
    """
    state = dict(manifest.stride)
    if "batches" in own:  # the global batch may change, and its history is kept
        allow = {*allow, "global_batch"}
        state = {"batches": [[0, state.get("global_batch")]], **state}
    for name in ("seed", "global_batch"):
        _require(name, state.get(name), own[name], name, allow)
    for name, kind in (("length", "number of samples"), ("shards", "set of shards")):
        if own["length"] is not None and state.get("length") is not None:
            _require("data", state.get(name), own[name], kind, allow)
    compared = {"kind": "kind of data set", "samples": "first, middle and last samples of digest"}
    for name, what in compared.items():
        if name in manifest.data and name in data:
            _require("data", manifest.data[name], data[name], what, allow)
    if state.get("seed") != own["seed"] and not _at_an_end(state):
        raise ConfigError(
            f"the checkpoint is in mid-epoch and has seed {state.get('seed')}, but this run has "
            f"seed {own['seed']}. The order of the samples would differ, so that some would be "
            "trained twice and others not at all; use the saved seed"
        )
    if "data" in allow and state.get("length") != own["length"]:
        if state.get("left") is not None and not _at_an_end(state):
            raise ConfigError(
                "the checkpoint is in mid-epoch of a sharded data set, so its position is not "
                "valid for another one; restore it with the same data set"
            )
        state |= {"length": own["length"], "shards": own["shards"], "left": None}
    # With global_batch="auto", the batch belongs to the position and is restored with it.
    batch = (state if "batches" in own else own)["global_batch"]
    return state | {"seed": own["seed"], "global_batch": batch}


def _require(flag: str, saved: object, mine: object, what: str, allow: Collection[str]) -> None:
    if saved == mine or flag in allow:
        return
    where = {
        "seed": ", which is possible at the start of an epoch",
        "global_batch": '; with Stride(global_batch="auto"), set EVENSTRIDE_GLOBAL_BATCH',
    }.get(flag, "")
    raise ConfigError(
        f"the checkpoint was saved with {what} {saved}, but this run has {mine}; make them equal, "
        f'or call restore(allow=("{flag}",)) to continue with the new value{where}'
    )


def _at_an_end(state: dict[str, Any]) -> bool:
    """Return whether a position is the start or the end of an epoch."""
    if not state["position"] or state["length"] is None:
        return True
    end = EpochCursor(state["length"], state["global_batch"], state["drop_last"]).end
    return bool(state["position"] >= end)
