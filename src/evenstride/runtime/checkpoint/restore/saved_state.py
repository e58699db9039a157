"""The saved state of a run as tensors and other items, and the states of its random generators.

Keys are paths: ``model/layer.weight``, ``optimizer/state/layer.weight/exp_avg``,
``extra/ema/module.weight``. Parameters have the names of the unwrapped model.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from evenstride.errors import CheckpointDamaged, ConfigError
from evenstride.runtime.checkpoint.format.state_codec import pack

MODEL, OPTIMIZER, SCHEDULER, EXTRA, RANDOM = "model", "optimizer", "scheduler", "extra", "random"


@dataclass(frozen=True, slots=True)
class SavedObjects:
    """The objects whose state is saved."""

    model: nn.Module  # plain, or wrapped by DDP or FSDP2
    optimizers: tuple[Optimizer, ...]  # of the model's parameters
    schedulers: tuple[Any, ...]  # objects with `state_dict` and `load_state_dict`
    extra: Mapping[str, Any]  # more such objects, by name

    def others(self) -> Iterator[tuple[str, Any]]:
        """Yield the schedulers and extra objects with their keys."""
        for n, scheduler in enumerate(self.schedulers):
            yield f"{SCHEDULER}/{n}", scheduler
        for name, each in self.extra.items():
            yield f"{EXTRA}/{name}", each

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Sources:
    """The tensors of a state."""

    shared: Mapping[str, Tensor]  # the same on every rank, or sharded; saved by all ranks

    # Saved from rank 0 only, such as buffers, which every rank updates by itself.
    leader: Mapping[str, Tensor]

    def outline(self) -> str:
        """Return a string that is equal on ranks with the same keys, shapes and dtypes."""
        both = ((key, t) for part in (self.shared, self.leader) for key, t in part.items())
        outline = repr([(key, tuple(t.shape), str(t.dtype)) for key, t in both])
        return hashlib.sha256(outline.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Collected:
    """The state of a run: tensors by key, and the other values of each object as JSON types."""

    sources: Sources
    items: Mapping[str, Any]


def training_of(model: Any, optimizer: Any, scheduler: Any, extra: Any) -> SavedObjects:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}; pass the torch.nn.Module that is trained"
        )
    optimizers = _several(optimizer)
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ConfigError(
                f"optimizer is a {type(each).__name__}; pass one or several torch.optim.Optimizer"
            )
    mine = {id(parameter) for parameter in model.parameters()}
    groups = [group for each in optimizers for group in each.param_groups]
    if not all(id(parameter) in mine for group in groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer has parameters that are not the model's, so they cannot be saved by "
            "name; pass the model that contains them; put several in one torch.nn.ModuleDict"
        )
    training = SavedObjects(model, optimizers, _several(scheduler), dict(extra or {}))
    for key, each in training.others():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ConfigError(
                f"{key} is a {type(each).__name__} without state_dict() and load_state_dict(); "
                "add both methods, or leave it out"
            )
    return training


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Sequence) else (given,)


def collect(training: SavedObjects) -> Collected:
    """Return the current state of a run; its tensors are the run's own, not copies."""
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
    """Return the parameters, equal on all ranks, and the other tensors, which may differ."""
    parameters = owner.parameters() if isinstance(owner, nn.Module) else ()
    # By address: a state dict holds detached tensors, not the parameters themselves.
    addresses = {p.data_ptr() for p in parameters if not isinstance(p, DTensor)}
    shared: dict[str, Tensor] = {}
    leader: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        alike = isinstance(tensor, DTensor) or tensor.data_ptr() in addresses
        (shared if alike else leader)[key] = tensor
    return shared, leader


def optimizer_state(
    training: SavedObjects, *, begun: bool = False, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the state of all optimizers by parameter names; the tensors are not copies.

    With ``begun``, an optimizer without state creates it as torch does: by a step with learning
    rate 0, which also calls the optimizer's hooks. ``options`` may ask torch for copies.
    """
    if not training.optimizers:
        return {"state": {}, "param_groups": []}
    with contextlib.nullcontext() if begun else _no_step(training):
        state: dict[str, Any] = get_optimizer_state_dict(
            training.model, training.optimizers, options=options
        )
    return state


@contextlib.contextmanager
def state_cleared_on_error(training: SavedObjects) -> Iterator[None]:
    """On an error inside, clear the state of optimizers that had none before."""
    without = [optimizer for optimizer in training.optimizers if not optimizer.state]
    try:
        yield
    except BaseException:
        for optimizer in without:
            optimizer.state.clear()
        raise


@contextlib.contextmanager
def _no_step(training: SavedObjects) -> Iterator[None]:
    """Set a gradient, so that torch does not step the optimizers to create their state."""
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


def capture_random(device: torch.device) -> dict[str, Any]:
    """Return the state of this rank's random generators: torch, its device, numpy, Python."""
    of_device = _generator(device)
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": _to_bytes(torch.get_rng_state()),
        # Under the device's type, as the state of another type of device is of no use.
        **({device.type: _to_bytes(of_device.get_rng_state(device))} if of_device else {}),
        "numpy": (kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)),
        "python": random.getstate(),
    }


def restore_random(state: Any, device: torch.device) -> None:
    """Restore all random generators to a state of `capture_random`.

    Raises:
        CheckpointDamaged: the state is invalid.
    """
    try:
        torch.set_rng_state(_to_tensor(state["torch"]))
        of_device, saved = _generator(device), state.get(device.type)
        if of_device and saved is not None:
            of_device.set_rng_state(_to_tensor(saved), device)
        np.random.set_state(_of_numpy(*state["numpy"]))
        random.setstate(state["python"])
    except (KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointDamaged("the state of a random generator is invalid") from error


def _generator(device: torch.device) -> Any:
    """Return the module that has the random generator of a device; ``None`` without one."""
    # The functions of MPS take no device, and evenstride does not train there.
    return None if device.type in ("cpu", "meta", "mps") else torch.get_device_module(device)


def check_random(state: Any, device: torch.device) -> None:
    """Raise like `restore_random`, without changing the generators."""
    own = capture_random(device)
    try:
        restore_random(state, device)
    finally:
        restore_random(own, device)


def _of_numpy(kind: Any, keys: Any, position: Any, has_gauss: Any, cached: Any) -> Any:
    """Return a state for numpy, after checks of numbers and position that numpy does not make."""
    whole = [*keys, position, has_gauss]
    if kind != "MT19937" or not all(type(number) is int for number in whole):
        raise ValueError("invalid state of a Mersenne twister")
    if len(keys) != 624 or not 0 <= position <= 624 or not isinstance(cached, float):
        raise ValueError("invalid state of a Mersenne twister")
    return kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached


def derive_random(seed: int, step: int, rank: int) -> None:
    """Seed all generators of a rank whose state is not in the checkpoint.

    The seed is a function of the run's seed, the step and the rank. So restarts are reproducible,
    and no two ranks draw the same numbers.
    """
    # numpy and Python use the same generator: with one seed they would draw the same numbers.
    for_torch, for_numpy, for_python = (
        np.random.SeedSequence([seed % 2**64, step, rank, n]).generate_state(4) for n in range(3)
    )
    torch.manual_seed(int(for_torch[0]) << 32 | int(for_torch[1]))
    np.random.seed(for_numpy)
    random.seed(for_python.tobytes())


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _to_tensor(state: Any) -> torch.Tensor:
    if not isinstance(state, bytes):  # bytearray(n) would create n zeros
        raise TypeError(f"the state of a generator is a {type(state).__name__}")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
