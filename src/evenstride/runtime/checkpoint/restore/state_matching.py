"""Checks that a checkpoint matches the model and the optimizers, and loads its state into them.

All checks come before the first tensor is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
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

from evenstride.errors import CheckpointDamaged, ConfigError
from evenstride.runtime.checkpoint.format.state_codec import pack, unpack
from evenstride.runtime.checkpoint.restore.saved_state import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    SCHEDULER,
    SavedObjects,
    optimizer_state,
)

# The most keys that an error names.
_FEW = 5
_STATE = f"{OPTIMIZER}/state/"
_FORMS = {"float": "number", "tuple": "list", "size": "list"} | dict.fromkeys(
    ("dict", "ordered"), "dictionary"
)
_OPTIMIZER_KEYS = ("state", "param_groups")


@dataclass(frozen=True, slots=True)
class RestoreTargets:
    """The tensors and states into which a checkpoint is loaded."""

    tensors: dict[str, Tensor]  # filled by the load, by key
    optimizer: dict[str, Any]  # the optimizers' present state
    states: dict[str, Any]  # states of all objects by key; they contain `tensors`


def targets_for(
    training: SavedObjects, metadata: Metadata, item: Callable[[str], Any]
) -> RestoreTargets:
    """Return the targets of a whole checkpoint; ``item`` reads one of its items.

    Raises:
        CheckpointDamaged: the checkpoint was not written by evenstride.
        ConfigError: it does not match the model, an optimizer or a scheduler.
    """
    saved = {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    tensors: dict[str, Tensor] = {}
    model = pack(get_model_state_dict(training.model), MODEL, tensors)
    items = {MODEL: item(MODEL), OPTIMIZER: item(OPTIMIZER)}
    _require_same(tensors, _under(saved, MODEL))
    require_like(model, items[MODEL], MODEL)
    optimizer, more = _optimizer_targets(training, items[OPTIMIZER], _under(saved, OPTIMIZER))
    tensors |= more
    for key, each in training.others():
        _require_item(key, metadata)
        items[key] = item(key)
        here: dict[str, Tensor] = {}
        own = pack(each.state_dict(), f"{key}/state", here)
        if key.startswith(SCHEDULER):
            _require_same_names(key, own, items[key], type(each).__name__)
        for name, entry in _under(saved, key).items():
            tensors[name] = _target(entry, here.get(name))
    for key, plain in items.items():
        _require_used(key, plain, _under(saved, key))
    _require_convertible(tensors, saved)
    states = {key: unpack(plain, tensors) for key, plain in items.items()}
    return RestoreTargets(tensors, optimizer, states)


def _require_used(key: str, item: Any, saved: Collection[str]) -> None:
    """Refuse an item that does not name exactly the tensors that were saved with it."""
    named, left = set[str](), [item]
    while left:
        plain = left.pop()
        if isinstance(plain, dict) and plain.get("$") in ("tensor", "array"):
            named.add(str(plain.get("v")))
        elif isinstance(plain, dict | list):
            left += plain.values() if isinstance(plain, dict) else plain
    if differing := named ^ set(saved):
        raise CheckpointDamaged(f"{key} does not match its tensors: {min(differing)[:200]}")


def _require_convertible(
    tensors: dict[str, Tensor], saved: dict[str, TensorStorageMetadata]
) -> None:
    """Refuse a dtype that torch cannot read, or cannot convert to this run's dtype."""
    pairs = {(saved[key].properties.dtype, tensor.dtype): key for key, tensor in tensors.items()}
    for (stored, wanted), key in pairs.items():
        try:
            one = torch.zeros(stored.itemsize, dtype=torch.uint8).view(stored)
            torch.empty(1, dtype=wanted).copy_(one)
        except (RuntimeError, TypeError) as error:
            raise CheckpointDamaged(
                f"{key} has dtype {stored}, which cannot be converted to {wanted}"
            ) from error


def _under(saved: dict[str, TensorStorageMetadata], key: str) -> dict[str, TensorStorageMetadata]:
    return {name: e for name, e in saved.items() if name == key or name.startswith(key + "/")}


def require_like(own: Any, saved: Any, where: str) -> None:
    """Refuse a saved state whose structure differs from this run's, both as JSON types.

    Dictionaries, lists, tensors and numbers must match. A number, text or list may be ``None`` on
    one side. Values that only one side has are ignored, except for tensors.

    Raises:
        CheckpointDamaged: the structures differ.
    """
    if own is None or (saved is None and _form(own) in ("number", "text", "list")):
        return
    if _form(own) != _form(saved):
        raise CheckpointDamaged(f"{where[:200]} is a {_form(saved)}; expected a {_form(own)}")
    if _form(own) == "dictionary":
        theirs = _fields(saved)
        for key, mine in _fields(own).items():
            if key in theirs:
                require_like(mine, theirs[key], f"{where}/{key}")
            elif _form(mine).startswith("tensor"):
                raise CheckpointDamaged(f"{where[:200]} lacks the {_form(mine)}")
    elif _form(own) == "list":
        for n, (mine, other) in enumerate(zip(_values(own), _values(saved), strict=False)):
            require_like(mine, other, f"{where}/{n}")


def _fields(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a dictionary with string keys, even if it was packed as pairs."""
    if "$" not in plain:
        return plain
    pairs = plain.get("v")
    whole = isinstance(pairs, list) and all(isinstance(p, list) and len(p) == 2 for p in pairs)
    return {p[0]: p[1] for p in pairs if isinstance(p[0], str)} if whole and pairs else {}


def _values(plain: Any) -> list[Any]:
    """Return the values of a list, even if it was packed as a tuple."""
    values = plain.get("v") if isinstance(plain, dict) else plain
    return values if isinstance(values, list) else []


def _form(plain: Any) -> str:
    if isinstance(plain, dict):
        kind = str(plain.get("$", "dictionary"))
        if kind in ("tensor", "array"):
            return f"{kind} {plain.get('v')!r}"
        return _FORMS.get(kind, kind)
    if isinstance(plain, bool | int | float):
        return "number"
    return {str: "text", list: "list", type(None): "None"}[type(plain)]


def _target(entry: TensorStorageMetadata, like: Tensor | None) -> Tensor:
    """Return an empty tensor for a stored one, on the device of ``like`` if the shapes match."""
    if like is not None and like.shape == entry.size:
        return torch.empty_like(like, dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _require_same(here: dict[str, Tensor], saved: dict[str, TensorStorageMetadata]) -> None:
    missing = [f"{key} is not in the checkpoint" for key in here if key not in saved]
    unknown = [f"{key} is only in the checkpoint" for key in saved if key not in here]
    shapes = [
        f"{key} has shape {tuple(here[key].shape)} here and {tuple(entry.size)} in the checkpoint"
        for key, entry in saved.items()
        if key in here and here[key].shape != entry.size
    ]
    _refuse(missing + unknown + shapes)


def _refuse(differences: list[str]) -> None:
    if not differences:
        return
    more = f", and {len(differences) - _FEW} more" if len(differences) > _FEW else ""
    raise ConfigError(
        "the checkpoint belongs to another model, optimizer or scheduler: "
        f"{'; '.join(differences[:_FEW])}{more}. No state was loaded. Create them as when it was "
        "saved, or use another folder to start from scratch"
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
        f"{key} is not in the checkpoint, which has {', '.join(known) or 'no such object'}; leave "
        "it out of the Checkpointer for this restore, or use another folder to start from scratch"
    )


def _require_same_names(key: str, own: Any, saved: Any, kind: str) -> None:
    """Refuse a scheduler of another kind: torch loads any state, and fails at a later step."""
    if not (isinstance(own, dict) and isinstance(saved, dict)):
        return
    lacks = [f"{name} is not in the checkpoint" for name in own if name not in saved]
    extra = [f"{name} is only in the checkpoint" for name in saved if name not in own]
    if lacks or extra:
        _refuse([f"{key} is another kind of scheduler ({kind} here): {(lacks + extra)[0]}"])


def _optimizer_targets(
    training: SavedObjects, item: Any, saved: dict[str, TensorStorageMetadata]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    _require_optimizer_item(item)
    # Tensors are read in place, so an optimizer without state must create it first.
    here = optimizer_state(training, begun=bool(item["state"]))
    _require_groups(here, item)
    known: dict[str, Tensor] = {}
    own = pack(here, OPTIMIZER, known)
    parameters = _by_name(training, here)
    tensors, differences = {}, []
    for key, entry in saved.items():
        name = _parameter_of(key, parameters)
        if not key.startswith(_STATE):
            tensors[key] = _target(entry, known.get(key))
        elif key in known and known[key].shape == entry.size:
            tensors[key] = known[key]
        elif name in here["state"] or name not in parameters:
            differences.append(f"{key} {tuple(entry.size)} is only in the checkpoint")
        else:  # a parameter that was trained before the save, but not yet in this run
            tensors[key] = _target(entry, parameters[name].detach())
    lacking = [
        f"{key} is not in the checkpoint"
        for key in known
        if key.startswith(_STATE)
        and key not in saved
        and _parameter_of(key, parameters) in item["state"]
    ]
    _refuse(differences + lacking)
    require_like(own["state"], item["state"], f"{OPTIMIZER}/state")
    mine, theirs = (list(map(_settings, each["param_groups"])) for each in (own, item))
    require_like(mine, theirs, f"{OPTIMIZER}/param_groups")
    return here, tensors


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings without tensors: a learning rate may be a tensor or a number."""
    return {key: value for key, value in group.items() if not _form(value).startswith("tensor")}


def _require_optimizer_item(item: Any) -> None:
    """Refuse an item that is not an optimizer's state by parameter names."""
    state, groups = (item.get(k) if isinstance(item, dict) else None for k in _OPTIMIZER_KEYS)
    if not (isinstance(state, dict) and isinstance(groups, list)):
        raise CheckpointDamaged("the optimizer's state lacks 'state' or 'param_groups'")
    for each in (*state.values(), *groups):
        if not isinstance(each, dict):
            raise CheckpointDamaged("the optimizer's state has entries that are not dictionaries")


def _parameter_of(key: str, parameters: dict[str, Tensor]) -> str:
    """Return the parameter that a tensor of the optimizer's state belongs to."""
    name = key.removeprefix(_STATE).partition("/")[0]
    if name in parameters:
        return name
    # Names may contain a slash, so one may be a prefix of another: the longest match counts.
    fitting = (other for other in parameters if key.startswith(f"{_STATE}{other}/"))
    return max(fitting, key=len, default=name)


def _require_groups(here: dict[str, Any], saved: dict[str, Any]) -> None:
    mine = [group["params"] for group in here["param_groups"]]
    theirs = [group.get("params") for group in saved["param_groups"]]
    if not all(isinstance(group, list) for group in theirs):
        raise CheckpointDamaged("an optimizer's parameter group has no list of parameters")
    if mine != theirs:
        _refuse(
            [
                f"the optimizer has parameter groups of {[len(g) for g in mine]} parameters here "
                f"and of {[len(g) for g in theirs]} in the checkpoint, or their order differs"
            ]
        )


def _by_name(training: SavedObjects, state: dict[str, Any]) -> dict[str, Tensor]:
    groups = [group for optimizer in training.optimizers for group in optimizer.param_groups]
    return {
        name: parameter
        for named, group in zip(state["param_groups"], groups, strict=True)
        for name, parameter in zip(named["params"], group["params"], strict=True)
    }


def put(training: SavedObjects, targets: RestoreTargets) -> None:
    """Load every object's state, after the tensors have been loaded into the targets."""
    set_model_state_dict(training.model, targets.states[MODEL])
    if training.optimizers:
        _put_optimizers(training, targets.states[OPTIMIZER], targets.optimizer)
    for key, each in training.others():
        each.load_state_dict(targets.states[key])


def _put_optimizers(training: SavedObjects, state: dict[str, Any], here: dict[str, Any]) -> None:
    if not state["state"]:
        _put_groups(training, state)
        return
    parameters = _by_name(training, here)
    fresh = [name for name in parameters if name not in state["state"]]
    for name in fresh:  # torch requires a state for every parameter
        state["state"][name] = here["state"].get(name, {})
    set_optimizer_state_dict(training.model, training.optimizers, optim_state_dict=state)
    # Remove these placeholders: the optimizer has not updated these parameters yet.
    for name in fresh:
        for optimizer in training.optimizers:
            optimizer.state.pop(parameters[name], None)


def _put_groups(training: SavedObjects, state: dict[str, Any]) -> None:
    """Restore only settings such as the learning rate, because there is no other state."""
    groups = iter(state["param_groups"])
    for optimizer in training.optimizers:
        own = optimizer.state_dict()["param_groups"]
        saved = [{**next(groups), "params": group["params"]} for group in own]
        optimizer.load_state_dict({"state": {}, "param_groups": saved})
