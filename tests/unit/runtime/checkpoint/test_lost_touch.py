"""A failed save frees its space, unless another rank may have completed it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from evenstride.runtime.checkpoint.format.manifest import Name, items_file, tensors_file
from evenstride.runtime.checkpoint.format.retention import Lineage
from evenstride.runtime.checkpoint.save import checkpoint_writer as module
from evenstride.runtime.checkpoint.save.checkpoint_writer import Saver
from tests.unit.runtime.checkpoint.kept import MemoryStorage

NAME = Name(20, "0123456789ab", 0)


def _failed(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> set[str]:
    """Return the files that remain after a rank's save has failed."""
    storage = MemoryStorage()

    def write(*_: Any) -> None:
        for file in (tensors_file(1), items_file(1)):
            storage.write(NAME.file(file), [b"x"])
        raise failure

    monkeypatch.setattr(module, "write", write)
    saver = Saver(storage, cast(Any, object()), 1)
    saver.start(cast(Any, SimpleNamespace(name=NAME, rank=1)), Lineage())
    outcome = saver.take()
    assert outcome is not None
    assert outcome.error
    return set(storage.files)


def test_a_failure_known_to_all_ranks_frees_the_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = CheckpointException("", {0: (OSError("full"), cast(Any, None))})
    assert not _failed(monkeypatch, known)


def test_a_disconnected_rank_keeps_its_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = _failed(monkeypatch, RuntimeError("Connection closed by peer"))
    assert left == {NAME.file(tensors_file(1)), NAME.file(items_file(1))}
