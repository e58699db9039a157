"""Finding the newest checkpoint that is whole, and whether this run may go on from it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from evenstride.core.partition import EpochCursor
from evenstride.errors import ConfigError, EvenstrideError
from evenstride.runtime.agreement import Plain
from evenstride.runtime.checkpoint.chance import derive
from evenstride.runtime.checkpoint.chance import restore as restore_chance
from evenstride.runtime.checkpoint.codec import unpack
from evenstride.runtime.checkpoint.errors import CheckpointDamaged, CheckpointError
from evenstride.runtime.checkpoint.fitting import Targets, objects_in, put, targets_for
from evenstride.runtime.checkpoint.manifest import (
    Manifest,
    Name,
    check_file,
    parse_name,
    read_manifest,
)
from evenstride.runtime.checkpoint.reading import Reader, read
from evenstride.runtime.checkpoint.retention import attempts
from evenstride.runtime.checkpoint.saver import told
from evenstride.runtime.checkpoint.states import (
    RANDOM,
    Training,
    begun_for_good,
)
from evenstride.runtime.checkpoint.storage import Storage
from evenstride.runtime.checkpoint.ties import Ties

logger = logging.getLogger("evenstride")

ALLOWED = ("data", "global_batch", "seed")


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored.

    Args:
        step: steps trained, over all restarts.
        folder: of the checkpoint, inside the folder of them all.
    """

    step: int
    folder: str


@dataclass(frozen=True, slots=True)
class Here:
    """The run that a checkpoint is restored into: its own state, and its data set."""

    stride: Any
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Restorer:
    """Restores a run; every rank has one, and makes the same calls.

    Args:
        storage: that has the checkpoints.
        ties: to the other ranks.
        group: of all ranks; ``None`` with one process.
        training: to be restored.
        here: likewise.
        allow: differences that are accepted.
    """

    storage: Storage
    ties: Ties
    group: dist.ProcessGroup | None
    training: Training
    here: Here
    allow: frozenset[str]

    def run(self, damaged: set[Name]) -> Restored | None:
        """Restore the newest checkpoint that is whole; ``None`` if there is none at all.

        Args:
            damaged: gets the names of those that are not.

        Raises:
            ConfigError: it is of another run; nothing has changed.
            CheckpointError: there are some, and none is whole.
        """
        complete, unfinished = self._find()
        reasons = []
        for name in complete:
            manifest, found = self._check(name)
            if not found["damage"]:
                assert manifest is not None, "a checkpoint without damage has a manifest"
                with begun_for_good(self.training):
                    return self._load(name, manifest)
            damaged.add(name)
            if found["ended"]:
                reasons.append(f"{name}: {found['damage']}")
            else:
                unfinished += 1
            if self.ties.rank == 0:
                logger.warning("checkpoint %s is passed over: %s", name, found["damage"])
        if reasons:
            raise CheckpointError(
                f"none of the {len(reasons)} checkpoints in {self.storage} can be read "
                f"({'; '.join(reasons[:3])}); bring one of them back, or choose another folder to "
                "start anew"
            )
        if self.ties.rank == 0:
            self._tell_of_nothing(unfinished)
        return None

    def _tell_of_nothing(self, unfinished: int) -> None:
        if unfinished:
            logger.warning(
                "there is no complete checkpoint in %s, only %d whose saving did not end; training "
                "starts anew",
                self.storage,
                unfinished,
            )
        else:
            logger.info("there is no checkpoint in %s yet; training starts anew", self.storage)

    def _find(self) -> tuple[list[Name], int]:
        """Return the attempts with a manifest, newest first, and the number of those without."""

        def show() -> Plain:
            unknown = sorted(self.allow - set(ALLOWED))
            if unknown:
                raise ConfigError(
                    f"restore(allow=...) got {', '.join(map(repr, unknown))}; what can be allowed "
                    f"to differ is {', '.join(ALLOWED)}"
                )
            return {}

        def judge(shown: list[Plain]) -> Plain:
            del shown
            try:
                complete, begun = attempts(self.storage)
            except Exception as error:
                raise CheckpointError(
                    f"the checkpoints in {self.storage} cannot be listed: {told(error)}; nothing "
                    "is restored, as a run that starts anew might replace them"
                ) from error
            return {"complete": list(map(str, complete)), "begun": len(begun)}

        verdict = self.ties.agree("restore()", show, judge)
        complete = [name for text in verdict["complete"] if (name := parse_name(text)) is not None]
        return complete, verdict["begun"]

    def _check(self, name: Name) -> tuple[Manifest | None, Plain]:
        """Return a checkpoint's manifest, and what some rank found to be wrong with it, if any.

        Each rank reads its part of the files. Without a right manifest it never ended.
        """
        manifests: list[Manifest] = []

        def show() -> Plain:
            try:
                manifests.append(read_manifest(self.storage, name))
            except CheckpointDamaged as error:
                return {"damage": str(error), "ended": False}
            except OSError as error:
                return {"damage": f"its manifest cannot be read ({told(error)})", "ended": True}
            adapted(manifests[0], self.here, self.allow)  # refused before reading all of it
            for file, info in self._mine(manifests[0]):
                damage = check_file(self.storage, name.file(file), info)
                if damage is not None:
                    return {"damage": damage, "ended": True}
            return {"damage": "", "ended": True}

        def judge(shown: list[Plain]) -> Plain:
            return next((mine for mine in shown if mine["damage"]), shown[0])

        found = self.ties.agree(f"restore() of {name}", show, judge)
        return (manifests[0] if manifests else None), found

    def _mine(self, manifest: Manifest) -> list[tuple[str, Any]]:
        files = sorted(manifest.files.items(), key=lambda item: (-item[1].size_bytes, item[0]))
        return files[self.ties.rank :: self.ties.world_size]

    def _load(self, name: Name, manifest: Manifest) -> Restored:
        reader = Reader(self.storage, name, manifest)
        before, targets = self.here.stride.state_dict(), list[Targets]()

        def show() -> Plain:
            targets.append(targets_for(self.training, reader))
            self.here.stride.load_state_dict(adapted(manifest, self.here, self.allow))
            return {}

        self.ties.agree(f"restore() from {name}", show, lambda shown: shown[0])
        own = f"{RANDOM}/{self.ties.rank}"
        metadata = reader.read_metadata()
        keys = [*targets[0].items, *([own] if own in metadata.state_dict_metadata else [])]
        try:
            with self.ties.waiting():
                asked = {**targets[0].tensors, **dict.fromkeys(keys)}
                items = read(asked, reader, self.group)
            put(self.training, targets[0], items)
        except BaseException as error:
            self.here.stride.load_state_dict(before)
            if isinstance(error, EvenstrideError) or not isinstance(error, Exception):
                raise
            raise CheckpointError(
                f"checkpoint {name} was whole, but could not be loaded: {told(error)}; some of the "
                "model may have been overwritten"
            ) from error
        self._tell_of_the_rest(metadata)
        self._restore_chance(items.get(own), manifest.step)
        self.ties.recall(manifest.workers)
        if self.ties.rank == 0:
            logger.info(
                "restored step %d from %s, saved by %d ranks, at %d ranks",
                manifest.step,
                name,
                manifest.world_size,
                self.ties.world_size,
            )
        return Restored(manifest.step, str(name))

    def _tell_of_the_rest(self, metadata: Metadata) -> None:
        """Warn of objects that were saved, and that this run has not been given."""
        given = {key for key, _ in self.training.others()}
        rest = [key for key in objects_in(metadata) if key not in given]
        if rest and self.ties.rank == 0:
            logger.warning(
                "the checkpoint also has %s, which this Checkpointer was not given: it is not "
                "restored, and not in the checkpoints to come",
                ", ".join(rest),
            )

    def _restore_chance(self, saved: Any, step: int) -> None:
        if saved is None:
            derive(self.here.stride.state_dict()["seed"], step, self.ties.rank)
        else:
            restore_chance(unpack(saved, {}), self.training.device)


def adapted(manifest: Manifest, here: Here, allow: Collection[str]) -> dict[str, Any]:
    """Return a checkpoint's position in the data as this run can go on from it.

    Raises:
        ConfigError: the run differs from the one that was saved, in a way that is not allowed.
    """
    state, own = dict(manifest.stride), here.stride.state_dict()
    if "batches" in own:  # the batch may be another one, and which there were is kept
        allow = {*allow, "global_batch"}
        state = {"batches": [[0, state.get("global_batch")]], **state}
    for name in ("seed", "global_batch"):
        _require(name, state.get(name), own[name], name, allow)
    for name, kind in (("length", "number of samples"), ("shards", "set of shards")):
        if own["length"] is not None and state.get("length") is not None:
            _require("data", state.get(name), own[name], kind, allow)
    told = {"kind": "kind of data set", "samples": "first, middle and last samples of digest"}
    for name, what in told.items():
        if name in manifest.data and name in here.data:
            _require("data", manifest.data[name], here.data[name], what, allow)
    if state.get("seed") != own["seed"] and not _at_an_end(state):
        raise ConfigError(
            f"the checkpoint has seed {state.get('seed')} and is in mid-epoch, and this run has "
            f"seed {own['seed']}: its order of the samples is another one, so that some would be "
            "trained twice and others not at all; use the saved seed"
        )
    if "data" in allow and state.get("length") != own["length"]:
        if state.get("left") is not None and not _at_an_end(state):
            raise ConfigError(
                "the checkpoint is in mid-epoch of data in shards, whose rest means nothing in "
                "other data; restore it with the data it was saved with"
            )
        state |= {"length": own["length"], "shards": own["shards"], "left": None}
    # An open batch is a matter of the position: it is taken over, or replaced, with that.
    batch = (state if "batches" in own else own)["global_batch"]
    return state | {"seed": own["seed"], "global_batch": batch}


def _require(flag: str, saved: object, mine: object, what: str, allow: Collection[str]) -> None:
    if saved == mine or flag in allow:
        return
    where = {
        "seed": ", which is possible where an epoch begins",
        "global_batch": '; with Stride(global_batch="auto"), set EVENSTRIDE_GLOBAL_BATCH',
    }.get(flag, "")
    raise ConfigError(
        f"the checkpoint was saved with {what} {saved}, and this run has {mine}; make them equal, "
        f'or call restore(allow=("{flag}",)) to go on with another one nevertheless{where}'
    )


def _at_an_end(state: dict[str, Any]) -> bool:
    """Return whether a position is where an epoch begins, or has just ended."""
    if not state["position"] or state["length"] is None:
        return True
    end = EpochCursor(state["length"], state["global_batch"], state["drop_last"]).end
    return bool(state["position"] >= end)
