"""Import what training needs, quickly."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from importlib import import_module
from typing import Any

# DDP and every optimizer of torch import this when first used; so nobody who trains is spared it.
_NEEDED_ANYWAY = "torch._dynamo"


def import_to_train(module: str) -> Any:
    """Return a module that needs torch, imported while the garbage collector rests.

    Some thousand modules are imported with it, and nothing of them is garbage, but the collector
    looks through them again and again: 0.4 of 1.7 s, paid at every restart.

    Raises:
        ImportError: it, or what it imports, is missing.
    """
    with _without_collections():
        with contextlib.suppress(ImportError):  # its own need of it tells more
            import_module(_NEEDED_ANYWAY)
        return import_module(module)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        _age()
    finally:
        gc.enable()


def _age() -> None:
    """Make all objects there are old, or the next collection would look through the new ones."""
    if not gc.get_freeze_count():  # what somebody has frozen stays so
        gc.freeze()
        gc.unfreeze()
