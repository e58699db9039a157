"""Whether a checkpoint fits the model and the optimizer there are, and putting its state there.

All that can be refused is refused before the first tensor is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint.codec import pack, unpack
from evenstride.runtime.checkpoint.reading import Reader
from evenstride.runtime.checkpoint.states import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    SCHEDULER,
    Training,
    optimizer_state,
)

# Keys that a refusal names.
_FEW = 5
_STATE = f"{OPTIMIZER}/state/"


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the tensors of a checkpoint go, and the optimizer's state as it is here."""

    tensors: dict[str, Tensor]
    optimizer: dict[str, Any]
    items: tuple[str, ...]


def targets_for(training: Training, reader: Reader) -> Targets:
    """Return where everything in a checkpoint goes.

    Raises:
        ConfigError: model, optimizer or another object differ from those that were saved.
    """
    metadata = reader.read_metadata()
    saved = {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    tensors: dict[str, Tensor] = {}
    pack(get_model_state_dict(training.model), MODEL, tensors)
    _require_same(tensors, _under(saved, MODEL))
    optimizer, more = _optimizer_targets(training, reader, _under(saved, OPTIMIZER))
    tensors |= more
    items = [MODEL, OPTIMIZER]
    for key, each in training.others():
        _require_item(key, metadata)
        items.append(key)
        here: dict[str, Tensor] = {}
        own = pack(each.state_dict(), f"{key}/state", here)
        if key.startswith(SCHEDULER):
            _require_same_names(key, own, reader.item(key), type(each).__name__)
        for name, entry in _under(saved, key).items():
            tensors[name] = _target(entry, here.get(name))
    return Targets(tensors, optimizer, tuple(items))


def _under(saved: dict[str, TensorStorageMetadata], key: str) -> dict[str, TensorStorageMetadata]:
    return {name: e for name, e in saved.items() if name == key or name.startswith(key + "/")}


def _target(entry: TensorStorageMetadata, like: Tensor | None) -> Tensor:
    """Return an empty tensor for a stored one: where and sharded as one there is of its shape."""
    if like is not None and like.shape == entry.size:
        return torch.empty_like(like, dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _require_same(here: dict[str, Tensor], saved: dict[str, TensorStorageMetadata]) -> None:
    missing = [f"{key} is not in the checkpoint" for key in here if key not in saved]
    unknown = [f"{key} is in the checkpoint only" for key in saved if key not in here]
    shapes = [
        f"{key} is {tuple(here[key].shape)} here and {tuple(entry.size)} in the checkpoint"
        for key, entry in saved.items()
        if key in here and here[key].shape != entry.size
    ]
    _refuse(missing + unknown + shapes)


def _refuse(differences: list[str]) -> None:
    if not differences:
        return
    more = f", and {len(differences) - _FEW} more" if len(differences) > _FEW else ""
    raise ConfigError(
        "the checkpoint is of another model, optimizer or scheduler: "
        f"{'; '.join(differences[:_FEW])}{more}; make them as they were when it was saved, or "
        "choose another folder to start anew. Nothing was loaded"
    )


def objects_in(metadata: Metadata) -> list[str]:
    """Return the keys of the schedulers and of the user's own objects in a checkpoint, sorted."""
    return sorted(
        key
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith((SCHEDULER, EXTRA)) and not isinstance(entry, TensorStorageMetadata)
    )


def _require_item(key: str, metadata: Metadata) -> None:
    if key in metadata.state_dict_metadata:
        return
    known = objects_in(metadata)
    raise ConfigError(
        f"{key} was not saved: the checkpoint has {', '.join(known) or 'no such object'}; leave it "
        "out of the Checkpointer for this restore, or choose another folder to start anew"
    )


def _require_same_names(key: str, own: Any, saved: Any, kind: str) -> None:
    """Refuse a scheduler of another kind: torch takes any state, and fails at a later step."""
    if not (isinstance(own, dict) and isinstance(saved, dict)):
        return
    lacks = [f"{name} is not in the checkpoint" for name in own if name not in saved]
    extra = [f"{name} is in the checkpoint only" for name in saved if name not in own]
    if lacks or extra:
        _refuse([f"{key} is another kind of scheduler ({kind} here): {(lacks + extra)[0]}"])


def _optimizer_targets(
    training: Training, reader: Reader, saved: dict[str, TensorStorageMetadata]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    plain = reader.item(OPTIMIZER)
    told: dict[str, Any] = plain if isinstance(plain, dict) else {}
    here = optimizer_state(training, begun=bool(told.get("state")))
    _require_groups(here, told)
    known: dict[str, Tensor] = {}
    pack(here, OPTIMIZER, known)
    parameters = _by_name(training, here)
    tensors, differences = {}, []
    for key, entry in saved.items():
        name = _parameter_of(key, parameters)
        if not key.startswith(_STATE):
            tensors[key] = _target(entry, known.get(key))
        elif key in known and known[key].shape == entry.size:
            tensors[key] = known[key]
        elif name in here["state"] or name not in parameters:
            differences.append(f"{key} {tuple(entry.size)} has no counterpart here")
        else:  # a parameter that was trained then, and has not been here
            tensors[key] = _target(entry, parameters[name].detach())
    lacking = [
        f"{key} is not in the checkpoint"
        for key in known
        if key.startswith(_STATE)
        and key not in saved
        and _parameter_of(key, parameters) in told.get("state", {})
    ]
    _refuse(differences + lacking)
    return here, tensors


def _parameter_of(key: str, parameters: dict[str, Tensor]) -> str:
    """Return the parameter that a tensor of the optimizer's state belongs to."""
    name = key.removeprefix(_STATE).partition("/")[0]
    if name in parameters:
        return name
    fitting = (other for other in parameters if key.startswith(f"{_STATE}{other}/"))
    return max(fitting, key=len, default=name)


def _require_groups(here: dict[str, Any], told: dict[str, Any]) -> None:
    mine = [group["params"] for group in here["param_groups"]]
    theirs = [group.get("params") for group in told.get("param_groups", [])]
    if mine != theirs:
        _refuse(
            [
                f"the optimizer has parameter groups of {[len(g) for g in mine]} parameters here "
                f"and of {[len(g or ()) for g in theirs]} in the checkpoint, or in another order"
            ]
        )


def _by_name(training: Training, state: dict[str, Any]) -> dict[str, Tensor]:
    groups = [group for optimizer in training.optimizers for group in optimizer.param_groups]
    return {
        name: parameter
        for told, group in zip(state["param_groups"], groups, strict=True)
        for name, parameter in zip(told["params"], group["params"], strict=True)
    }


def put(training: Training, targets: Targets, items: dict[str, Any]) -> None:
    """Give every object its state, once the tensors have been loaded into the targets."""
    set_model_state_dict(training.model, unpack(items[MODEL], targets.tensors))
    if training.optimizers:
        _put_optimizers(training, unpack(items[OPTIMIZER], targets.tensors), targets.optimizer)
    for key, each in training.others():
        each.load_state_dict(unpack(items[key], targets.tensors))


def _put_optimizers(training: Training, state: dict[str, Any], here: dict[str, Any]) -> None:
    if not state["state"]:
        _put_groups(training, state)
        return
    parameters = _by_name(training, here)
    fresh = [name for name in parameters if name not in state["state"]]
    for name in fresh:  # torch wants a state for every parameter
        state["state"][name] = here["state"].get(name, {})
    set_optimizer_state_dict(training.model, training.optimizers, optim_state_dict=state)
    for name in fresh:
        for optimizer in training.optimizers:
            optimizer.state.pop(parameters[name], None)


def _put_groups(training: Training, state: dict[str, Any]) -> None:
    """Restore settings such as the learning rate; there is no other state."""
    groups = iter(state["param_groups"])
    for optimizer in training.optimizers:
        own = optimizer.state_dict()["param_groups"]
        told = [{**next(groups), "params": group["params"]} for group in own]
        optimizer.load_state_dict({"state": {}, "param_groups": told})
