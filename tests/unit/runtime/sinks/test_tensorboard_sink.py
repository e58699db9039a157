"""TensorBoard's events, read back by TensorBoard."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenstride.runtime.sinks.snapshot import NamedMean, Sample, neutral
from tests.unit.runtime.sinks.made import HOSTILE, snapshot, with_news

pytest.importorskip("tensorboard", reason="needs the extra tensorboard")

from evenstride.runtime.sinks.tensorboard_sink import TensorBoardSink


def read(folder: Path) -> Any:
    """Return TensorBoard's view of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 6)) for event in read(folder).Scalars(tag)]


def test_numbers_come_back_with_their_steps(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "new")
    sink.write(with_news(40))
    sink.write(snapshot(50, busy_s=0.5))
    sink.close()

    folder = tmp_path / "new"
    assert scalars(folder, "evenstride/step_seconds") == [(40, 0.3), (50, 0.3)]
    assert scalars(folder, "evenstride_worker_busy_seconds/a") == [(40, 0.25), (50, 0.5)]
    assert scalars(folder, "evenstride_metric/loss") == [(38, 0.75)]
    assert scalars(folder, "evenstride/epochs") == [(40, 1.5), (50, 1.5)]


def test_an_alert_is_a_text(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(with_news(40))
    sink.close()

    (tag,) = read(tmp_path).Tags()["tensors"]
    (event,) = read(tmp_path).Tensors(tag)

    assert tag.startswith("evenstride_alert/b/1")
    assert event.step == 40
    assert b"worker b/1 runs at 0.40" in event.tensor_proto.string_val[0]


def test_repeated_steps_replace_the_earlier_ones(tmp_path: Path) -> None:
    for life, steps in enumerate(((40, 50, 60), (50, 55))):
        sink = TensorBoardSink(tmp_path)
        for step in steps:
            sink.write(snapshot(step, busy_s=float(life)))
        sink.close()
        # Files are read in the order of their names, which contain the second of their creation.
        (made,) = tmp_path.glob("events*.*.*.*.*")
        made.rename(tmp_path / f"events.out.tfevents.{life}")

    points = scalars(tmp_path, "evenstride_worker_busy_seconds/a")

    assert points == [(40, 0.0), (50, 1.0), (55, 1.0)]


def test_names_have_only_characters_that_tensorboard_allows(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    label = neutral(HOSTILE)
    sink.write(replace(snapshot(), samples=(Sample("worker_busy_seconds", label, 1.0),)))
    sink.close()

    (tag,) = [tag for tag in read(tmp_path).Tags()["scalars"] if "busy" in tag]

    name, _, part = tag.rpartition("-")
    assert name == "evenstride_worker_busy_seconds/a_b_n_x_____x1b_2J_script__u202e/0"
    assert re.fullmatch("[0-9a-f]{6}", part)


def test_metrics_that_differ_only_in_other_characters_stay_separate(tmp_path: Path) -> None:
    names = ("acc@1", "acc 1", "acc_1")
    for life in range(2):
        sink = TensorBoardSink(tmp_path)
        found = tuple(NamedMean(40 + life, 0.5, name, float(n)) for n, name in enumerate(names))
        sink.write(replace(snapshot(50), found=found))
        sink.close()

    tags = [tag for tag in read(tmp_path).Tags()["scalars"] if "metric/" in tag]

    assert len(tags) == 3
    assert "evenstride_metric/acc_1" in tags
    values = [[value for _, value in scalars(tmp_path, tag)] for tag in tags]
    assert sorted(values) == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], "the same tag in each process"
