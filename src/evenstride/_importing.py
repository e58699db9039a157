"""Import the training modules quickly, and public names when they are first used."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

# DDP and every torch optimizer import this at first use, so every training run pays for it.
_NEEDED_ANYWAY = "torch._dynamo"


def import_to_train(module: str) -> Any:
    """Return a module that needs torch, imported while the garbage collector is off.

    The import loads some thousand modules. None of their objects is garbage, but the collector
    would scan them repeatedly: 0.4 of 1.7 s, at every restart.

    Raises:
        ImportError: the module, or one that it imports, is missing.
    """
    if module in sys.modules and _NEEDED_ANYWAY in sys.modules:
        # Without `_age`, which counts the frozen objects one by one: 30 ms after `gc.freeze`.
        return import_module(module)
    with _without_collections():
        with contextlib.suppress(ImportError):  # importing `module` explains it better
            import_module(_NEEDED_ANYWAY)
        return import_module(module)


def later(package: str, names: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports each public name when it is first used.

    The package can then export names of its modules without importing all of them. ``names`` maps
    each module to its public names.
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
    """Move all objects to the oldest generation, so that the next collection skips the new ones."""
    if not gc.get_freeze_count():  # objects that the user froze stay frozen
        gc.freeze()
        gc.unfreeze()
