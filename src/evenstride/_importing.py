"""Import what training needs, quickly, and public names when they are first used."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
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


def later(package: str, names: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports each public name when it is first used.

    So a package may export names of its modules, and importing one of them imports no other.
    ``names`` are the public ones of each module.
    """
    places = {name: f"{package}.{module}" for module, some in names.items() for name in some}

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(places[name]), name)

    return get


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
