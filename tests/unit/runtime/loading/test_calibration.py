"""Batches of chosen sizes for chosen times."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.errors import ConfigError
from evenstride.runtime.loading.loader_options import CalibrationStage, batch_sizes, parse_stages
from evenstride.trace.run_log import RunLog
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import Trainer, numbered


def _ticking() -> Callable[[], float]:
    """Return a clock on which a second passes with every look."""
    return itertools.count(100.0).__next__


def test_stages_are_read_in_order() -> None:
    assert parse_stages("0.333:1.5,1:0, 0.2:2") == (
        CalibrationStage(0.333, 1.5),
        CalibrationStage(1.0, 0.0),
        CalibrationStage(0.2, 2.0),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.5",
        "0.5:1,",
        "0:1",
        "1.01:1",
        "-0.5:1",
        "0.5:-1",
        "a:b",
        "0.5:1:2",
        "nan:1",
        "0.5:nan",
    ],
)
def test_an_invalid_text_is_refused_with_an_example(text: str) -> None:
    with raises_message(ConfigError, "PART", "SECONDS", "0.333:1.5,0.2:1.5"):
        parse_stages(text)


def test_each_stage_lasts_its_time() -> None:
    sizes = list(
        batch_sizes((CalibrationStage(0.5, 6.0), CalibrationStage(0.25, 9.0)), 8, _ticking())
    )

    # The clock is first looked at when a stage begins, and then after every step from the fourth.
    assert sizes == [4] * 9 + [2] * 12


@given(
    stages=st.lists(
        st.builds(CalibrationStage, st.floats(0.01, 1.0), st.floats(0, 20)), min_size=1, max_size=4
    ),
    batch=st.integers(1, 500),
)
def test_a_size_is_at_least_one_and_served_a_few_times(
    stages: list[CalibrationStage], batch: int
) -> None:
    sizes = list(batch_sizes(tuple(stages), batch, _ticking()))

    asked = [max(1, round(stage.part * batch)) for stage in stages]
    assert [size for size, _ in itertools.groupby(sizes)] == [
        n for n, _ in itertools.groupby(asked)
    ]
    assert len(sizes) >= 4 * len(stages)


def test_a_lone_process_trains_on_those_sizes_and_ends(
    make_stride: MakeStride, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_CALIBRATE", "0.5:0,0.25:0")
    stride = make_stride(global_batch=8)
    loader, trainer = stride.loader(numbered(21)), Trainer(stride)

    sizes = [len(ids) for ids in trainer.epoch(loader)]
    with pytest.raises(SystemExit) as ended:
        trainer.epoch(loader)

    assert sizes == [4, 4, 4, 4, 2, 2, 2, 2], "it never runs out of samples"
    assert (stride.step, ended.value.code) == (8, 0)


def test_a_wish_that_is_not_understood_is_refused_before_training(
    make_stride: MakeStride, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_CALIBRATE", "half")
    stride = make_stride()

    with raises_message(ConfigError, "EVENSTRIDE_CALIBRATE is 'half'"):
        stride.loader(numbered(21))


def test_the_last_steps_of_a_calibration_are_in_its_trace(
    make_stride: MakeStride, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exchanges are far apart by then, and without a last one a whole size would be missing."""
    monkeypatch.setenv("EVENSTRIDE_CALIBRATE", "0.5:0,0.25:0,0.75:0")
    stride = make_stride(global_batch=8, trace=tmp_path / "trace.jsonl")
    loader, trainer = stride.loader(numbered(64)), Trainer(stride)

    trainer.epoch(loader)
    stride.close()

    steps = {seen.share: 0 for seen in RunLog(tmp_path / "trace.jsonl").observations}
    for seen in RunLog(tmp_path / "trace.jsonl").observations:
        steps[seen.share] += len(seen.busy_s)
    assert steps == {4: 4, 2: 4, 6: 4}
