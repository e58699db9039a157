"""Notice that a gradient scaler has ended a step, also one whose update it left out.

A `torch.amp.GradScaler` does not call the optimizer where a gradient is not finite, and torch
offers no hook for that. All ranks leave out the same steps: the reduced gradient is the same bytes
on all of them, and of gradients that are sharded (FSDP2) torch itself takes the maximum of what
the ranks found. What every loop calls in the end is ``update``.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_hooks: OrderedDict[int, Callable[[], None]] = OrderedDict()


def register_scaler_update_hook(hook: Callable[[], None]) -> RemovableHandle:
    """Call a hook after ``update`` of any gradient scaler of this process.

    Kinds of scalers that are defined later are covered if their ``update`` calls that of
    `torch.amp.GradScaler`. A scaler's ``update`` is wrapped once per process and stays so; without
    a hook that does nothing.

    Args:
        hook: called without arguments; twice where a scaler's ``update`` calls another's.

    Returns:
        A handle whose ``remove`` ends it, as for the hooks of optimizers.

    Cost:
        Some 1 us per update.
    """
    for kind in _kinds(torch.amp.GradScaler):
        update = vars(kind).get("update")
        if update is not None and not hasattr(update, "_evenstride_calls_hooks"):
            setattr(kind, "update", _calling_hooks(update))  # noqa: B010
    handle = RemovableHandle(_hooks)
    _hooks[handle.id] = hook
    return handle


def _calling_hooks(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def updated(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        for hook in tuple(_hooks.values()):
            hook()

    updated._evenstride_calls_hooks = True  # type: ignore[attr-defined]
    return updated


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for special in kind.__subclasses__():
        yield from _kinds(special)
