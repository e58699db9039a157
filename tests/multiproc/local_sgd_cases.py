"""What ranks do with local SGD beyond plain training."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from evenstride.errors import ConfigError, EvenstrideError
from evenstride.runtime.synchronisation.local_sgd import LocalTraining
from tests.inside import session
from tests.multiproc.training import FEATURES, net, rows, weights

TABLE = (*(k / 7 for k in range(50)), float("-inf"))


def _sync(stride: evenstride.Stride) -> LocalTraining:
    sync = session(stride).sync
    assert isinstance(sync, LocalTraining)
    return sync


class Normed(nn.Module):
    """Batch norm of the input, and a table that is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, dtype=torch.float64)
        self.module = net()
        self.register_buffer("table", torch.tensor(TABLE, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers."""
        y: Tensor = self.module(self.norm(x))
        return y


def buffered(rank: int, sync: str) -> list[tuple[list[int], dict[str, Any]]]:
    """Return the ids of each step of an epoch of 4, and the buffers after it."""
    stride = evenstride.Stride(global_batch=30, policy="static:10,20", sync=sync)
    loader, module = stride.loader(rows(120)), Normed()
    model = stride.watch(DistributedDataParallel(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = list[tuple[list[int], dict[str, Any]]]()
    for ids, x, y in loader:
        stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
        if rank and len(seen) == 1 and module.norm.num_batches_tracked is not None:
            module.norm.num_batches_tracked.add_(5)
        optimizer.step()
        optimizer.zero_grad()
        buffers = {name: tensor.tolist() for name, tensor in module.named_buffers()}
        seen.append((ids.tolist(), buffers))
    stride.close()
    return seen


def settled(rank: int) -> list[tuple[bool, list[float]]]:
    """Return after each step of an epoch of 7 whether it was settled, and the weights.

    After the second step, a round of 4 is settled early.
    """
    stride = evenstride.Stride(global_batch=30, policy="static:10,20", sync="local-sgd(every=4)")
    loader, module = stride.loader(rows(200)), net()
    model = stride.watch(DistributedDataParallel(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for _, x, y in loader:
        stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        seen.append((_sync(stride).settled, weights(module)))
        if stride.step == 2:
            _sync(stride).settle()
            seen.append((_sync(stride).settled, weights(module)))
    stride.close()
    return seen


def refused(rank: int) -> list[str]:
    """Return how ranks are refused what local SGD cannot have."""
    stride = evenstride.Stride(global_batch=4, policy="uniform", sync="local-sgd(every=2)")
    texts, data, model = [], rows(8), DistributedDataParallel(net())
    with pytest.raises(ConfigError) as error:
        stride.loader(data, weight_fn=len if rank else None)
    texts.append(str(error.value))
    loader = stride.loader(data)
    settings: list[dict[str, Any]] = [{"drift_check": 5}, {"compress": "bf16"}]
    for setting in settings:
        with pytest.raises(ConfigError) as error:
            stride.watch(model, **setting)
        texts.append(str(error.value))
    model = stride.watch(model)
    for _, x, _ in loader:
        with pytest.raises(EvenstrideError) as refusal:
            stride.scale(model(x).sum(), weight=2.0)
        texts.append(str(refusal.value))
        break
    stride.close()
    return texts


def divided(rank: int, sync: str, parts: int) -> list[list[float]]:
    """Return the weights after every step, with so many optimizers."""
    stride = evenstride.Stride(global_batch=30, policy="static:7,23", sync=sync)
    loader, module = stride.loader(rows(200)), net()
    model = stride.watch(DistributedDataParallel(module))
    parameters = list(module.parameters())
    optimizers = [torch.optim.SGD(parameters[part::parts], lr=0.1) for part in range(parts)]
    seen = []
    while stride.epoch < 2:
        for _, x, y in loader:
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            seen.append(weights(module))
    stride.close()
    return seen


def resumed(rank: int, sync: str, stop: int | None, saved: Any) -> tuple[Any, list[float]]:
    """Train to the end of the third epoch, or some steps; return the state then, and the weights.

    Args:
        rank: this rank.
        sync: mode of synchronisation.
        stop: steps after which to stop.
        saved: what an earlier run returned, to go on from.
    """
    stride = evenstride.Stride(global_batch=30, policy="static:7,23", sync=sync)
    loader, module = stride.loader(rows(200)), net()
    model = stride.watch(DistributedDataParallel(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if saved is not None:
        (position, velocities), flat = saved
        stride.load_state_dict(position)
        nn.utils.vector_to_parameters(torch.tensor(flat, dtype=torch.float64), module.parameters())
        states = {name: torch.tensor(v, dtype=torch.float64) for name, v in velocities.items()}
        _sync(stride).load_state_dict({"velocities": states})
    while stride.epoch < 3 and stride.step != stop:
        for _, x, y in loader:
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if stride.step == stop:
                break
    assert _sync(stride).settled
    state = _sync(stride).state_dict()["velocities"]
    velocities = {name: velocity.tolist() for name, velocity in state.items()}
    stride.close()
    return (stride.state_dict(), velocities), weights(module)


def _plain(state: Any) -> Any:
    """Return a state with lists in place of tensors."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_plain(value) for value in state]
    return state.tolist() if isinstance(state, Tensor) else state


def saved_and_kept(rank: int, kind: str, stop: int, saved: Any) -> tuple[Any, Any, list[float]]:
    """Train two epochs of 7 steps; return what a save in the midst holds, and the last weights.

    The former twice: for another process, and to be looked at.

    Args:
        rank: this rank.
        kind: of the optimizer.
        stop: steps after which the save is made, in mid-round.
        saved: what an earlier run returned, to go on from.
    """
    sync = "local-sgd(every=4,outer_rate=0.7,outer_momentum=0.9)"
    stride = evenstride.Stride(global_batch=30, policy="static:7,23", sync=sync)
    loader, module = stride.loader(rows(200)), net()
    model = stride.watch(DistributedDataParallel(module))
    settings = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.05, **settings)
    seen = None
    if saved is not None:
        position, *states = pickle.loads(saved)
        stride.load_state_dict(position)
        for holder, state in zip((module, optimizer, _sync(stride)), states, strict=True):
            holder.load_state_dict(state)
    while stride.epoch < 2:
        for _, x, y in loader:
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if stride.step == stop:
                _sync(stride).bring_home()
                holders = (stride, module, optimizer, _sync(stride))
                reported = [holder.state_dict() for holder in holders]
                saved, seen = pickle.dumps(reported), _plain(reported)
    stride.close()
    return saved, seen, weights(module)


def limited(rank: int, steps: int) -> list[float]:
    """Return the weights of a run that is allowed so many steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENSTRIDE_MAX_STEPS", str(steps))
        sync = "local-sgd(every=4)"
        stride = evenstride.Stride(global_batch=30, policy="static:7,23", sync=sync)
        loader, module = stride.loader(rows(200)), net()
        model = stride.watch(DistributedDataParallel(module))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for (_, x, y), _ in zip(loader, itertools.count(), strict=False):
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        assert stride.step == steps
        stride.close()
        return weights(module)
