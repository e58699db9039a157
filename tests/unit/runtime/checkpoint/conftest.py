"""Runs that save, ended when their test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.runtime.checkpoint.kept import Runs


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Make runs of one process; what fails is tried again without a pause."""
    monkeypatch.setattr("evenstride.runtime.checkpoint.format.storage.FIRST_PAUSE_S", 0.0)
    made = Runs(monkeypatch)
    yield made
    made.end()
