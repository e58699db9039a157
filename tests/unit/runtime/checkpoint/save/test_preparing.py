"""The leader's view of the comparisons and tests before the first save."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from evenstride.errors import ConfigError, RanksDisagree
from evenstride.runtime.checkpoint.save import preparing
from evenstride.runtime.checkpoint.save.preparing import CheckpointerArguments, Prepared, prepare
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.environment import Environment
from tests.messages import check_message, raises_message
from tests.unit.runtime.checkpoint.kept import FullStorage, MemoryStorage


class Ties:
    """The leader of two ranks; the other one shows the same values, except for a change."""

    def __init__(self, **change: Any) -> None:
        self._change = change
        self.shown: list[Plain] = []

    def agree(
        self, call: str, show: Callable[[], Plain], judge: Callable[[list[Plain]], Plain]
    ) -> Plain:
        """Return the leader's answer."""
        mine = show()
        assert call == "Checkpointer()"
        asked = {**mine["asked"], **self._change.get("asked", {})}
        self.shown = [mine, {**mine, **self._change, "asked": asked}]
        return judge(self.shown)


def _prepare(
    monkeypatch: pytest.MonkeyPatch, storage: Any, ties: Ties, **settings: Any
) -> Prepared:
    monkeypatch.setattr(preparing, "open_storage", lambda _: storage)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    asked = {"every": 5, "keep": 2, "extra": None, "environment": Environment(), **settings}
    return prepare(
        CheckpointerArguments("there", model=model, optimizer=optimizer, scheduler=None, **asked),
        cast(Any, ties),
    )


def test_the_folder_is_left_as_it_was_and_the_run_has_a_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = MemoryStorage()

    prepared = _prepare(monkeypatch, storage, Ties())

    assert not storage.files
    assert re.fullmatch("[0-9a-f]{12}", prepared.generation)
    assert not caplog.text


@pytest.mark.parametrize("asked", [{"every": "Cadence()"}, {"keep": 3}, {"states": ["more"]}])
def test_different_arguments_on_the_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    storage = MemoryStorage()

    with raises_message(RanksDisagree):
        _prepare(monkeypatch, storage, Ties(asked=asked))

    assert not storage.files


def test_a_rank_that_writes_elsewhere_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _prepare(monkeypatch, MemoryStorage(), Ties(token="on another disk"))

    check_message(caplog.messages, "rank 1", "rank 0")


def test_a_rank_that_cannot_write_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _prepare(monkeypatch, MemoryStorage(), Ties(problem="OSError: read-only", token="none"))

    check_message(caplog.messages, "rank 1")
    assert "does not see" not in caplog.text


def test_a_failing_store_does_not_prevent_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FullStorage):
        def list(self, folder: str = "") -> list[str]:
            raise PermissionError(folder)

    storage = Broken()
    storage.error = OSError("full")
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=7))

    prepared = _prepare(monkeypatch, storage, Ties())

    check_message(caplog.messages, "rank 0")
    assert re.fullmatch("[0-9a-f]{8}0007", prepared.generation)


@pytest.mark.parametrize("keep", [True, 0, -1, 1.5, "2"])
def test_an_invalid_keep_is_refused(monkeypatch: pytest.MonkeyPatch, keep: Any) -> None:
    with raises_message(ConfigError):
        _prepare(monkeypatch, MemoryStorage(), Ties(), keep=keep)
