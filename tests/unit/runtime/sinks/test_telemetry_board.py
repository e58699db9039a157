"""The reports after exchanges; their errors never end training."""

from __future__ import annotations

import csv
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from evenstride.core.control.events import FleetFormed
from evenstride.core.diagnostics.alerts import Alerts
from evenstride.core.fleet import Worker
from evenstride.core.gradients.noise_scale import StepParts
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.sinks.csv_sink import CsvSink
from evenstride.runtime.sinks.sink_settings import open_sinks
from evenstride.runtime.sinks.snapshot import BY_NAME, Snapshot, rows_of
from evenstride.runtime.sinks.telemetry_board import TelemetryBoard
from evenstride.trace.codec import TraceWriter
from evenstride.trace.read import read_records
from tests.messages import check_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.sinks.made import HOSTILE, exchange, led
from tests.unit.runtime.solo import Trainer, numbered


class Kept:
    """A sink that keeps its snapshots."""

    def __init__(self) -> None:
        self.written: list[Snapshot] = []
        self.closed = 0

    def write(self, snapshot: Snapshot) -> None:
        """Keep the snapshot."""
        self.written.append(snapshot)

    def close(self) -> None:
        """Count the calls."""
        self.closed += 1

    def latest(self) -> dict[tuple[str, str], float]:
        """Return the latest numbers."""
        return {(one.metric, one.label): one.value for one in self.written[-1].samples}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_leaders_figures_reach_the_sinks() -> None:
    leader, sink = led(), Kept()
    leader.board = TelemetryBoard({"kept": sink})
    exchange(leader, 0, 1, (0.2, 0.4))
    exchange(leader, 1, 4, (0.25, 0.25))

    latest = sink.latest()

    assert sink.written[-1].step == 5
    assert latest["step_seconds", ""] == pytest.approx(0.25)
    assert latest["global_batch_samples", ""] == 12
    assert latest["changes_total", ""] == leader.changes
    assert latest["worker_share_samples", "a/0"] == leader.control.shares[0]
    assert latest["worker_busy_seconds", "b/1"] == pytest.approx(0.25)
    assert latest["worker_wait_seconds", "b/1"] == 0.0
    assert latest["worker_data_seconds", "a/0"] == pytest.approx(0.01 / 4)
    assert ("worker_speed_ratio", "a/0") not in latest, "too little time has passed"
    assert latest["worker_slow", "a/0"] == latest["worker_unneeded", "b/1"] == 0.0
    assert 0 < latest["efficiency_model_ratio", ""] <= latest["bound_model_ratio", ""]
    assert {metric for metric, _ in latest} <= BY_NAME.keys()


def test_figures_per_step_begin_again_with_a_new_fleet() -> None:
    leader, sink = led(), Kept()
    leader.board = TelemetryBoard({"kept": sink})
    exchange(leader, 0, 2, (0.2, 0.4))

    leader.form(FleetFormed(1, 2, 12, tuple(map(Worker, ("a/0", "c/2")))))
    exchange(leader, 2, 5, (0.1, 0.1))

    assert sink.latest()["step_seconds", ""] == pytest.approx(0.1)


def test_waits_are_those_since_the_previous_exchange() -> None:
    leader, sink = led(), Kept()
    leader.board = TelemetryBoard({"kept": sink})
    exchange(leader, 0, 4, (0.1, 0.4))

    assert sink.latest()["worker_wait_seconds", "a/0"] == pytest.approx(0.3)

    exchange(leader, 4, 4, (0.2, 0.2))

    assert sink.latest()["worker_wait_seconds", "a/0"] == 0.0


def test_an_alert_is_in_the_log_the_trace_and_the_sinks_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leader, sink = led(("a/0", HOSTILE), policy="uniform"), Kept()
    leader.board = TelemetryBoard({"kept": sink}, Alerts(0.7))
    leader.record_to(TraceWriter(tmp_path / "trace.jsonl", {"policy": "adaptive"}))
    with caplog.at_level(logging.WARNING, logger="evenstride"):
        for first in range(0, 100, 10):
            exchange(leader, first, 10, (0.2, 0.2))
        for first in range(100, 200, 10):
            exchange(leader, first, 10, (0.2, 0.6))
    leader.close({})

    (logged,) = caplog.messages
    (noted,) = [r for r in read_records(tmp_path) if r["kind"] == "alert"]
    (alert,) = [alert for each in sink.written for alert in each.alerts]

    assert logged == f"step {alert.step}: {alert.reason}"
    assert "\\x1b[2J" in logged
    assert logged.isprintable()
    assert (noted["alert"], noted["step"], noted["reason"]) == ("slow", alert.step, alert.reason)
    assert noted["since"] == 100
    assert noted["speed"] == pytest.approx(1 / 3, rel=0.2)
    assert sink.latest()["alerts_total", ""] == 1
    assert sink.latest()["worker_slow", alert.worker] == 1.0


def test_a_worker_without_samples_is_not_reported() -> None:
    leader, sink = led(("a/0", "b/1", "c/2")), Kept()
    leader.board = TelemetryBoard({"kept": sink})
    busy_s = (0.2, 0.2, 0.2)
    exchange(leader, 0, 4, busy_s)
    assert ("worker_share_samples", "b/1") in sink.latest()

    exchange(leader, 4, 4, busy_s, notice=1)
    exchange(leader, 8, 4, busy_s, notice=1)

    assert leader.control.rank_shares[1] == 0
    assert {label for metric, label in sink.latest() if metric == "worker_share_samples"} == {
        "a/0",
        "c/2",
    }
    assert "b/1" not in {label for _, label in sink.latest()}


def test_measured_gradient_noise_reaches_the_sinks() -> None:
    leader, sink = led(), Kept()
    leader.board = TelemetryBoard({"kept": sink})
    exchange(leader, 0, 4, (0.2, 0.2))
    assert not [metric for metric, _ in sink.latest() if metric.startswith("gradient_noise")]

    whole = (StepParts(step, 2, 12, 12, 12 * 5.0, 3.0) for step in range(200))
    leader.noise, _ = leader.noise.hear(whole)
    exchange(leader, 4, 4, (0.2, 0.2))

    scale = leader.noise.estimate.scale()
    assert sink.latest()["gradient_noise_scale", ""] == scale.value > 0
    assert sink.latest()["gradient_noise_scale_low", ""] == scale.low


class Broken(Kept):
    """A sink that fails from its second snapshot on, and when it closes."""

    def write(self, snapshot: Snapshot) -> None:
        """Keep the snapshot, and fail later."""
        super().write(snapshot)
        if len(self.written) > 1:
            raise OSError(28, "No space left\x1b[2J")

    def close(self) -> None:
        """Count the call, and fail."""
        super().close()
        raise OSError("still no space")


def test_a_sink_that_fails_is_named_once_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    leader, broken, sink = led(), Broken(), Kept()
    leader.board = TelemetryBoard({"csv:full\n": broken, "kept": sink})

    with caplog.at_level(logging.WARNING, logger="evenstride"):
        for first in range(0, 20, 4):
            exchange(leader, first, 4, (0.2, 0.2))
        leader.close({})

    check_message(caplog.messages, "28")
    assert (len(broken.written), broken.closed) == (2, 1)
    assert (len(sink.written), sink.closed) == (5, 1)


def test_a_sink_that_fails_to_close_is_also_named(caplog: pytest.LogCaptureFixture) -> None:
    broken, sink = Broken(), Kept()
    board = TelemetryBoard({"one": broken, "other": sink})

    board.close()
    board.close()

    check_message(caplog.messages)
    assert (broken.closed, sink.closed) == (1, 1)


def _opened(path: Path) -> int:
    """Return the descriptor by which this process has a file open."""
    links = Path("/proc/self/fd")
    (own,) = (int(one.name) for one in links.iterdir() if one.exists() and one.samefile(path))
    return own


def test_a_full_disk_ends_the_file_but_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leader, sink = led(), CsvSink(tmp_path / "m.csv")
    leader.board = TelemetryBoard({"csv:m.csv": sink})
    exchange(leader, 0, 4, (0.2, 0.2))
    written = (tmp_path / "m.csv").read_bytes()
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), _opened(tmp_path / "m.csv"))

    exchange(leader, 4, 4, (0.2, 0.2))
    exchange(leader, 8, 4, (0.2, 0.2))

    (message,) = caplog.messages
    check_message(message, "m.csv", "28")
    assert leader.ledger.steps == 12
    assert (tmp_path / "m.csv").read_bytes() == written


def test_an_error_in_the_alerts_does_not_end_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = led()
    leader.board = TelemetryBoard()

    def fail(*args: Any, **more: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(Alerts, "after", fail)
    exchange(leader, 0, 4, (0.2, 0.2))

    check_message(caplog.messages)
    assert leader.ledger.steps == 4


def test_means_have_their_own_steps_and_the_last_is_not_lost(
    make_stride: MakeStride, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.csv"
    stride = make_stride(sinks=[f"csv:{path}"])
    loader, trainer = stride.loader(numbered(40)), Trainer(stride)
    for _ in range(2):
        trainer.epoch(loader)
        stride.mean(3.0, 2, name="loss")
    stride.mean(float("nan"), 1, name="loss\n")
    stride.close()

    found = [row for row in rows(path) if row["metric"] == "metric"]

    assert [(r["step"], r["epochs"], r["label"], r["value"]) for r in found] == [
        ("10", "1", "loss", "1.5"),
        ("20", "2", "loss", "1.5"),
        ("20", "2", "loss\\n", "nan"),
    ]


def test_means_after_the_last_exchange_are_written_at_the_end() -> None:
    sink = Kept()
    board = TelemetryBoard({"kept": sink})
    board.hear("metric", {"step": 7, "epochs": 0.5, "name": "loss", "value": 0.25})

    board.close()

    assert [tuple(found) for found in sink.written[-1].found] == [(7, 0.5, "loss", 0.25)]
    assert sink.written[-1].samples == ()


def test_the_mean_of_a_later_step_waits_for_the_next_snapshot() -> None:
    leader, sink = led(), Kept()
    leader.board = TelemetryBoard({"kept": sink})
    for step in (3, 5):  # training has gone on while the leader decides
        leader.board.hear("metric", {"step": step, "epochs": 0.0, "name": "loss", "value": 0.5})
    exchange(leader, 0, 4, (0.2, 0.4))
    exchange(leader, 4, 4, (0.2, 0.4))

    written = [row for one in sink.written for row in rows_of(one)]

    assert [step for step, _ in written] == [3, 4, 5, 8]


def test_means_from_before_a_return_to_an_earlier_state_do_not_hold_up_others() -> None:
    leader, sink = led(), Kept()
    leader.board = TelemetryBoard({"kept": sink})
    for step in (102, 2):
        leader.board.hear("metric", {"step": step, "epochs": 0.0, "name": "loss", "value": 0.5})
    exchange(leader, 0, 4, (0.2, 0.4))

    assert [one.step for one in sink.written[-1].found] == [102, 2]


def test_a_continued_training_counts_all_its_steps(make_stride: MakeStride, tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    stride = make_stride(sinks=f"csv:{path}")
    loader, trainer = stride.loader(numbered(40)), Trainer(stride)
    trainer.epoch(loader)
    state = stride.state_dict()
    stride.close()
    stride = make_stride(sinks=f"csv:{path}")
    stride.load_state_dict(state)
    loader, trainer = stride.loader(numbered(40)), Trainer(stride)
    trainer.epoch(loader)
    stride.close()

    steps = [(int(r["step"]), float(r["epochs"])) for r in rows(path) if r["metric"] == "step"]

    assert steps == sorted(steps)
    assert steps[-1][0] in (19, 20), "the last exchange may come before the last step's end"
    assert all(epochs == pytest.approx(step / 10) for step, epochs in steps)
    assert path.read_text().count("unix_s") == 1


def test_the_last_exchange_does_not_report_an_earlier_step(
    make_stride: MakeStride, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always = property(lambda _: 1, lambda _, _due: None)
    monkeypatch.setattr(Leader, "exchange_at", always, raising=False)
    stride = make_stride(sinks=f"csv:{tmp_path / 'metrics.csv'}")
    Trainer(stride).epoch(stride.loader(numbered(40)))
    stride.close()

    found = rows(tmp_path / "metrics.csv")
    steps = [int(row["step"]) for row in found if row["metric"] == "step"]
    assert steps[:10] == list(range(1, 11))
    assert set(steps[10:]) == {10}


def test_the_environment_sets_the_default_sinks(
    make_stride: MakeStride, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVENSTRIDE_SINKS", f"csv:{tmp_path / 'theirs.csv'}")
    monkeypatch.setenv("EVENSTRIDE_ALERT_BELOW", "0.5")

    make_stride().close()
    make_stride(sinks=f"csv:{tmp_path / 'ours.csv'}").close()
    make_stride(sinks=()).close()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.csv", "theirs.csv"]


def test_the_fraction_comes_from_the_argument_then_the_environment(
    make_stride: MakeStride, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVENSTRIDE_ALERT_BELOW", "0.5")
    for name, given in (("given", {"alert_below": 0.9}), ("left", {})):
        make_stride(trace=tmp_path / name, **given).close()

    headers = [next(iter(read_records(tmp_path / name))) for name in ("given", "left")]

    assert [header["alert_below"] for header in headers] == [0.9, 0.5]


def test_after_the_end_all_sinks_are_closed(make_stride: MakeStride, tmp_path: Path) -> None:
    stride = make_stride(sinks=f"csv:{tmp_path / 'm.csv'}")
    stride.close()
    stride.close()

    (sink,) = open_sinks([f"csv:{tmp_path / 'm.csv'}"]).values()
    sink.close()
    with pytest.raises(OSError):
        sink.write(Snapshot(0.0, 0, None))


def test_epochs_are_counted_with_the_batch_of_the_pass() -> None:
    """At the end of an epoch the next batch is known before its first step."""
    leader, sink = led(), Kept()
    leader.board = TelemetryBoard({"kept": sink})
    leader.note("pass", step=0, epochs=2.0, samples=120, global_batch=6)

    exchange(leader, 0, 5, (0.2, 0.2))

    assert sink.written[-1].epochs == pytest.approx(2.25)
