"""A fixture for runs that save; it ends them after the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.runtime.checkpoint.kept import Runs


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Create runs of one process; failed operations are retried without a pause."""
    monkeypatch.setattr("evenstride.runtime.checkpoint.format.storage.FIRST_PAUSE_S", 0.0)
    made = Runs(monkeypatch)
    yield made
    made.end()
