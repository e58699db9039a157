"""What is saved of a training run, taken apart into tensors and items, and put back together.

Keys are paths: ``model/layer.weight``, ``optimizer/state/layer.weight/exp_avg``,
``extra/ema/module.weight``. Names of parameters are those of the plain model, whatever wraps it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint.format.state_codec import pack
from evenstride.runtime.checkpoint.save.write_ownership import Sources

MODEL, OPTIMIZER, SCHEDULER, EXTRA, RANDOM = "model", "optimizer", "scheduler", "extra", "random"


@dataclass(frozen=True, slots=True)
class SavedObjects:
    """The objects whose state is saved.

    Args:
        model: plain, or wrapped by DDP or FSDP2.
        optimizers: of its parameters.
        schedulers: with ``state_dict`` and ``load_state_dict``.
        extra: likewise, by name.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    extra: Mapping[str, Any]

    def others(self) -> Iterator[tuple[str, Any]]:
        """Yield what has a state of its own besides model and optimizer, by its key."""
        for n, scheduler in enumerate(self.schedulers):
            yield f"{SCHEDULER}/{n}", scheduler
        for name, each in self.extra.items():
            yield f"{EXTRA}/{name}", each

    @property
    def device(self) -> torch.device:
        """Where the model is; the CPU if it has no parameters."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Collected:
    """The state of a run: tensors by key, and for each part its other values as JSON types."""

    sources: Sources
    items: Mapping[str, Any]


def training_of(model: Any, optimizer: Any, scheduler: Any, extra: Any) -> SavedObjects:
    """Return the objects to save, checked.

    Raises:
        ConfigError: one of them is not what it has to be.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}; give the torch.nn.Module that is trained"
        )
    optimizers = _several(optimizer)
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ConfigError(
                f"optimizer is a {type(each).__name__}; give a torch.optim.Optimizer, or several"
            )
    mine = {id(parameter) for parameter in model.parameters()}
    groups = [group for each in optimizers for group in each.param_groups]
    if not all(id(parameter) in mine for group in groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer has parameters that are not the model's, so they have no name to be "
            "saved by; give the model they belong to, several as one torch.nn.ModuleDict"
        )
    training = SavedObjects(model, optimizers, _several(scheduler), dict(extra or {}))
    for key, each in training.others():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ConfigError(
                f"{key} is a {type(each).__name__} without state_dict() and load_state_dict(); "
                "give it both, or leave it out"
            )
    return training


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Sequence) else (given,)


def collect(training: SavedObjects) -> Collected:
    """Return the state of a run as it is now; its tensors are the run's own, not copies.

    Raises:
        ConfigError: some state cannot be saved safely; names where and what it is.
    """
    model: dict[str, Tensor] = {}
    items = {MODEL: pack(get_model_state_dict(training.model), MODEL, model)}
    shared, leader = _by_owner(model, training.model)
    items[OPTIMIZER] = pack(optimizer_state(training), OPTIMIZER, shared)
    more_items, more_shared, more_leader = collect_others(training)
    sources = Sources(shared | more_shared, leader | more_leader)
    return Collected(sources, items | more_items)


def collect_others(
    training: SavedObjects,
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return items, shared tensors and the leader's tensors of schedulers and extra objects."""
    items: dict[str, Any] = {}
    shared: dict[str, Tensor] = {}
    leader: dict[str, Tensor] = {}
    for key, each in training.others():
        tensors: dict[str, Tensor] = {}
        items[key] = pack(each.state_dict(), f"{key}/state", tensors)
        mine, theirs = _by_owner(tensors, each)
        shared, leader = shared | mine, leader | theirs
    return items, shared, leader


def _by_owner(
    tensors: dict[str, Tensor], owner: object
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what all ranks have alike, parameters, and the rest, which may differ by rank."""
    parameters = owner.parameters() if isinstance(owner, nn.Module) else ()
    # By address: the tensors of a state dict are detached, so they are not the parameters
    # themselves.
    addresses = {p.data_ptr() for p in parameters if not isinstance(p, DTensor)}
    shared: dict[str, Tensor] = {}
    leader: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        alike = isinstance(tensor, DTensor) or tensor.data_ptr() in addresses
        (shared if alike else leader)[key] = tensor
    return shared, leader


def optimizer_state(training: SavedObjects, *, begun: bool = False) -> dict[str, Any]:
    """Return the state of all optimizers by parameter names; tensors are their own.

    Args:
        training: whose optimizers.
        begun: let optimizers that have no state yet make one, as torch does it: by a step at a
            learning rate of 0, which also calls the optimizer's hooks.
    """
    if not training.optimizers:
        return {"state": {}, "param_groups": []}
    with contextlib.nullcontext() if begun else _no_step(training):
        state: dict[str, Any] = get_optimizer_state_dict(training.model, training.optimizers)
    return state


@contextlib.contextmanager
def begun_for_good(training: SavedObjects) -> Iterator[None]:
    """Let optimizers that had no state have none again if something goes wrong inside."""
    without = [optimizer for optimizer in training.optimizers if not optimizer.state]
    try:
        yield
    except BaseException:
        for optimizer in without:
            optimizer.state.clear()
        raise


@contextlib.contextmanager
def _no_step(training: SavedObjects) -> Iterator[None]:
    """Let torch believe that gradients are there, so that it does not step the optimizers."""
    given = []
    for optimizer in training.optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if parameters and not optimizer.state and all(p.grad is None for p in parameters):
            given.append(parameters[0])
            parameters[0].grad = parameters[0].detach()
    try:
        yield
    finally:
        for parameter in given:
            parameter.grad = None
