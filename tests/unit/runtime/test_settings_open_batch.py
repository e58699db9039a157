"""A global batch that is left open: where it comes from, and states of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstride
from evenstride.errors import ConfigError
from evenstride.runtime.settings import Batch, batch_of
from tests.messages import check_message, raises_message

SAMPLES = 40


@pytest.mark.parametrize(
    ("asked", "bounds", "environment", "batch"),
    [
        (64, None, None, Batch(64)),
        (64, None, 128, Batch(64)),
        ("auto", (64, 1024), None, Batch(64, (64, 1024), chosen=True)),
        ("auto", (64, 1024), 256, Batch(256, (64, 1024))),
        ("auto", (64, 1024), 0, Batch(64, (64, 1024))),
        ("auto", [64, 64], 64, Batch(64, (64, 64))),
    ],
)
def test_the_environment_chooses_only_where_the_script_leaves_it_open(
    asked: Any, bounds: Any, environment: int | None, batch: Batch
) -> None:
    assert batch_of(asked, bounds, environment) == batch


@pytest.mark.parametrize(
    ("variable", "asked", "warnings"),
    [
        ("128", {"global_batch": 64}, 1),
        ("64", {"global_batch": 64}, 0),
        ("low", {"global_batch": 64}, 0),
        ("128", {"global_batch": "auto", "bounds": (64, 128)}, 0),
    ],
)
def test_an_unused_batch_of_the_environment_causes_a_warning(
    variable: str,
    asked: dict[str, Any],
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("EVENSTRIDE_GLOBAL_BATCH", variable)
    evenstride.Stride(**asked).close()

    texts = [one.getMessage() for one in caplog.records if "GLOBAL_BATCH" in one.getMessage()]
    assert len(texts) == warnings
    check_message(texts, *(["128", "global_batch=64"] if warnings else []))


@pytest.mark.parametrize(
    ("asked", "bounds", "environment", "words"),
    [
        (64, (32, 128), None, ()),
        ("auto", None, None, ()),
        ("auto", (64,), None, ()),
        ("auto", "64", None, ()),
        ("auto", (0, 64), None, ()),
        ("auto", (64, 32), None, ("32",)),
        ("auto", (64, 1.5), None, ("1.5",)),
        ("auto", (True, 64), None, ()),
        ("auto", (64, 128), 32, ("EVENSTRIDE_GLOBAL_BATCH is 32", "64", "128")),
        ("auto", (64, 128), 129, ("EVENSTRIDE_GLOBAL_BATCH is 129",)),
    ],
)
def test_invalid_batches_and_bounds_are_refused_with_the_range(
    asked: Any, bounds: Any, environment: int | None, words: tuple[str, ...]
) -> None:
    with raises_message(ConfigError, *words):
        batch_of(asked, bounds, environment)


class Run:
    """One process of a run, with what a script has."""

    def __init__(self, folder: Path, batch: Any = "auto", **settings: Any) -> None:
        bounds = (4, 16) if batch == "auto" else None
        self.stride = evenstride.Stride(batch, bounds=bounds, **settings)
        self.loader = self.stride.loader(TensorDataset(torch.arange(float(SAMPLES)).view(-1, 1)))
        self.net = self.stride.watch(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-6)
        self.checkpoint = evenstride.Checkpointer(
            folder, self.stride, model=self.net, optimizer=optimizer, notices="off"
        )
        self.optimizer = optimizer

    def train(self, steps: int) -> list[float]:
        """Train so many steps; return their samples."""
        seen = list[float]()
        until = self.stride.step + steps
        while self.stride.step < until:
            for (x,) in self.loader:
                loss = self.stride.scale(self.net(x).square().mean())
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.optimizer.zero_grad()
                seen += x.view(-1).tolist()
                if self.stride.step == until:
                    break
        return seen

    def end(self) -> None:
        self.checkpoint.save()
        self.checkpoint.close()
        self.stride.close()


def test_an_epoch_continues_with_another_batch_and_the_batches_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, shown = list[float](), list[Any]()
    for batch, steps in ((4, 3), (16, 1), (12, 1)):
        monkeypatch.setenv("EVENSTRIDE_GLOBAL_BATCH", str(batch))
        run = Run(tmp_path)
        run.checkpoint.restore()
        assert run.stride.global_batch == batch
        seen += run.train(steps)
        shown.append(run.stride.state_dict()["batches"])
        assert run.stride.epoch == (batch == 12)
        run.end()

    assert sorted(seen) == list(range(SAMPLES))  # 12 + 16 + 12, each once
    assert shown[-1] == [[0, 4], [3, 16], [4, 12]]


def test_where_gradients_are_not_averaged_the_lower_bound_is_kept() -> None:
    assert batch_of("auto", (64, 1024), None, averages=False) == Batch(64)
    assert batch_of("auto", (64, 1024), 128, averages=False) == Batch(128, (64, 1024))


def test_a_state_of_another_batch_is_refused_where_the_script_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_GLOBAL_BATCH", "16")
    first = Run(tmp_path)
    first.train(1)
    first.end()

    monkeypatch.delenv("EVENSTRIDE_GLOBAL_BATCH")
    run = Run(tmp_path, 8)
    with raises_message(ConfigError, "global_batch", "16", "EVENSTRIDE_GLOBAL_BATCH"):
        run.checkpoint.restore()
    run.stride.close()


def test_a_state_saved_with_a_batch_of_its_own_can_be_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Run(tmp_path, 8)
    first.train(2)
    first.end()

    monkeypatch.setenv("EVENSTRIDE_GLOBAL_BATCH", "4")
    run = Run(tmp_path)
    run.checkpoint.restore()

    assert run.stride.state_dict()["position"] == 16
    assert run.stride.state_dict()["batches"] == [[0, 8], [2, 4]]
    run.end()


def test_a_state_of_another_batch_is_loaded_without_a_checkpoint_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVENSTRIDE_GLOBAL_BATCH", "4")
    before = evenstride.Stride("auto", bounds=(4, 16))
    monkeypatch.setenv("EVENSTRIDE_GLOBAL_BATCH", "16")
    after = evenstride.Stride("auto", bounds=(4, 16))

    after.load_state_dict(before.state_dict() | {"position": 12, "step": 3})

    assert after.state_dict()["position"] == 12
    assert after.state_dict()["batches"] == [[0, 4], [3, 16]]
    fixed = evenstride.Stride(8)
    with raises_message(ConfigError, "global_batch"):
        fixed.load_state_dict(before.state_dict())
    for stride in (before, after, fixed):
        stride.close()


def test_a_fixed_batch_says_nothing_of_batches() -> None:
    stride = evenstride.Stride(8)

    assert "batches" not in stride.state_dict()
    assert stride.global_batch == 8
    stride.close()


def test_an_open_batch_is_taken_over_from_the_state_within_the_bounds() -> None:
    fixed = evenstride.Stride(8)
    state = fixed.state_dict() | {"position": 16, "step": 2}
    run = evenstride.Stride("auto", bounds=(4, 16))

    run.load_state_dict(state)

    assert run.global_batch == 8
    assert run.state_dict()["batches"] == [[0, 8]]
    for batch in (3, 17, None, "8"):
        with raises_message(ConfigError, "16"):
            run.load_state_dict({**state, "global_batch": batch})
    assert run.global_batch == 8, "a refusal changes nothing"
    for stride in (fixed, run):
        stride.close()


@pytest.mark.parametrize(("text", "batch"), [("low", 4), ("16", 16), ("", 4)])
def test_the_variable_holds_a_batch_for_the_whole_process(
    monkeypatch: pytest.MonkeyPatch, text: str, batch: int
) -> None:
    monkeypatch.setenv("EVENSTRIDE_GLOBAL_BATCH", text)
    stride = evenstride.Stride("auto", bounds=(4, 16))

    assert stride.global_batch == batch
    assert (stride.summary().noise is None) == bool(text), "only a choice needs the noise"
    stride.close()


@pytest.mark.parametrize("text", ["lowest", "0", "-4", "1.5"])
def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("EVENSTRIDE_GLOBAL_BATCH", text)
    with raises_message(ConfigError):
        evenstride.Stride("auto", bounds=(4, 16))


def test_an_epoch_ends_where_its_own_batch_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With drop_last, 100 samples are 3 steps of 30; the rest is no step of the next batch."""
    state = {**_laid_out(30).state_dict(), "position": 90, "step": 3}
    monkeypatch.setenv("EVENSTRIDE_GLOBAL_BATCH", "20")

    for with_loader in (True, False):
        run = _laid_out(None) if with_loader else evenstride.Stride("auto", bounds=(4, 64))
        run.load_state_dict(state)

        assert run.epoch == 1
        assert run.state_dict()["position"] == 0
        run.close()


def _laid_out(batch: int | None) -> evenstride.Stride:
    """Return a run over 100 samples, with a batch of its own or an open one."""
    fixed = evenstride.Stride(batch) if batch else evenstride.Stride("auto", bounds=(4, 64))
    fixed.loader(TensorDataset(torch.arange(100.0)), drop_last=True)
    return fixed


def test_a_batch_that_leaves_no_step_is_refused_wherever_it_comes_from() -> None:
    large = evenstride.Stride(48).state_dict()
    before = evenstride.Stride("auto", bounds=(4, 64))
    before.load_state_dict(large)
    with raises_message(ConfigError, "40 samples", "48"):
        before.loader(TensorDataset(torch.arange(40.0)), drop_last=True)

    after = evenstride.Stride("auto", bounds=(4, 64))
    after.loader(TensorDataset(torch.arange(40.0)), drop_last=True)
    with raises_message(ConfigError, "40 samples", "48"):
        after.load_state_dict(large)
    assert after.global_batch == 4, "a refusal changes nothing"
    for stride in (before, after):
        stride.close()


@pytest.mark.parametrize("batches", ["xx", [[1]], [[None, 4]], 7])
def test_invalid_batches_are_refused_and_change_nothing(batches: Any) -> None:
    run = evenstride.Stride("auto", bounds=(4, 64))
    state = {**run.state_dict(), "global_batch": 8, "batches": batches}

    with raises_message(ConfigError):
        run.load_state_dict(state)
    assert run.global_batch == 4
    run.close()
