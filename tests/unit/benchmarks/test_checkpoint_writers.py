"""The comparison of checkpoint writers, on a small state."""

from __future__ import annotations

import pytest
from benchmarks import checkpoint_writers


def test_our_files_are_balanced_and_damage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writers, "WRITERS", ("ours",))

    figures = checkpoint_writers.compare(megabytes=1.0, ranks=2, rounds=1)["ours"]

    assert figures["balance"] < 1.01
    assert figures["damage"].pop("one process") == "equal"
    assert set(figures["damage"].values()) == {"refused (digest)"}
