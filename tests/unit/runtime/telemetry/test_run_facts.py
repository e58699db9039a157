"""Results of evaluation and starts of passes, in the trace of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evenstride.errors import ConfigError
from evenstride.trace.read import read_records
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import Trainer, numbered


def recorded(trace: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(trace) if record["kind"] == kind]


def test_a_named_mean_is_recorded_with_its_position(
    make_stride: MakeStride, tmp_path: Path
) -> None:
    stride = make_stride(trace=tmp_path)
    loader, trainer = stride.loader(numbered(10)), Trainer(stride)
    assert stride.mean(3.0, 2, name="loss") == 1.5
    for _ in range(2):
        for batch in loader:
            trainer.step(batch)
            stride.mean(torch.tensor([6.0]), 4, name="train/loss")
    stride.mean(1.0, 4, name="loss")
    stride.mean(1.0, 4)
    stride.close()

    rows = [(r["step"], r["epochs"], r["name"], r["value"]) for r in recorded(tmp_path, "metric")]

    assert rows[0] == (0, 0.0, "loss", 1.5)
    assert rows[-1] == (6, 2.0, "loss", 0.25)
    assert [row[0] for row in rows[1:-1]] == [1, 2, 3, 4, 5, 6]
    assert [row[1] for row in rows[1:-1]] == [0.4, 0.8, 1.0, 1.4, 1.8, 2.0]
    assert {row[2:] for row in rows[1:-1]} == {("train/loss", 1.5)}


def test_values_that_are_not_finite_are_null(make_stride: MakeStride, tmp_path: Path) -> None:
    stride = make_stride(trace=tmp_path)
    stride.mean(0.0, 0, name="loss")
    stride.mean(float("inf"), 1, name="loss")
    stride.close()

    assert [record["value"] for record in recorded(tmp_path, "metric")] == [None, None]


@pytest.mark.parametrize(
    ("total", "name", "why"),
    [
        (torch.ones(2), "loss", ()),
        (1.0, "", ("100",)),
        (1.0, 7, ("100",)),
        (1.0, "x" * 101, ("100",)),
    ],
)
def test_invalid_names_and_values_are_refused(
    make_stride: MakeStride, tmp_path: Path, total: Any, name: Any, why: tuple[str, ...]
) -> None:
    stride = make_stride(trace=tmp_path)

    with raises_message(ConfigError, *why):
        stride.mean(total, 1, name=name)

    stride.close()
    assert not recorded(tmp_path, "metric")


def test_without_a_name_several_numbers_are_allowed(make_stride: MakeStride) -> None:
    assert torch.equal(
        torch.as_tensor(make_stride().mean(torch.ones(2), 2)), torch.full((2,), 0.5).double()
    )


def test_without_a_trace_a_name_changes_nothing(make_stride: MakeStride) -> None:
    assert make_stride().mean(3.0, 2, name="loss") == 1.5


def test_a_continued_training_counts_all_its_epochs(
    make_stride: MakeStride, tmp_path: Path
) -> None:
    first = make_stride(trace=tmp_path)
    loader, trainer = first.loader(numbered(10)), Trainer(first)
    trainer.epoch(loader)
    trainer.epoch(loader, steps=1)
    state = first.state_dict()
    trainer.epoch(loader, steps=1)
    first.close()

    second = make_stride(trace=tmp_path)
    second.load_state_dict(state)
    second.mean(1.0, 1, name="before the loader")
    loader, trainer = second.loader(numbered(10)), Trainer(second)
    trainer.epoch(loader)
    second.mean(1.0, 1, name="after")
    second.close()

    passes = [(r["step"], r["epochs"], r["samples"]) for r in recorded(tmp_path, "pass")]
    assert passes == [(0, 0.0, 10), (3, 1.0, 10), (4, 1.4, 10), (0, 1.4, 10)]
    metrics = [(r["step"], r["epochs"]) for r in recorded(tmp_path, "metric")]
    assert metrics == [(4, 1.4), (6, 2.0)]


def test_dropped_samples_do_not_count_in_an_epoch(make_stride: MakeStride, tmp_path: Path) -> None:
    stride = make_stride(trace=tmp_path)
    loader, trainer = stride.loader(numbered(10), drop_last=True), Trainer(stride)
    trainer.epoch(loader, steps=1)
    stride.mean(1.0, 1, name="half")
    stride.close()

    assert [record["epochs"] for record in recorded(tmp_path, "metric")] == [0.5]
    assert [record["samples"] for record in recorded(tmp_path, "pass")] == [8]
