"""Importing what training needs, with the garbage collector at rest."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstride._importing import import_to_train


@pytest.fixture(autouse=True)
def _nothing_is_frozen() -> Iterator[None]:
    """Undo for a while what `tests.conftest` does for all."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a module that notes whether the collector was at work."""
    name = "notes_the_collector"
    (tmp_path / f"{name}.py").write_text("import gc\nenabled = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_the_collector_rests_during_the_import_and_works_after_it(module: str) -> None:
    assert import_to_train(module).enabled is False
    assert gc.isenabled()


def test_a_collector_that_the_user_has_switched_off_stays_off(module: str) -> None:
    gc.disable()
    try:
        import_to_train(module)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_works_again_when_the_import_fails() -> None:
    with pytest.raises(ImportError, match="there_is_no_such_module"):
        import_to_train("there_is_no_such_module")
    assert gc.isenabled()


def test_what_ddp_and_the_optimizers_import_later_is_there_already(module: str) -> None:
    import_to_train(module)
    assert "torch._dynamo" in sys.modules


def test_imported_objects_are_old_and_can_still_be_collected(module: str) -> None:
    import_to_train(module)
    imported = sys.modules[module]
    assert any(one is imported for one in gc.get_objects(generation=2))
    assert not gc.get_freeze_count()


def test_what_the_user_has_frozen_stays_frozen(module: str) -> None:
    gc.freeze()
    try:
        import_to_train(module)
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_modules_that_are_imported_early_may_be_missing(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)

    assert import_to_train(module).enabled is False


def test_a_module_that_is_there_is_returned_without_counting_frozen_objects(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = import_to_train(module)
    monkeypatch.delattr(gc, "get_freeze_count")

    assert import_to_train(module) is first
