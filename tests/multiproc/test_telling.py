"""Sinks and alerts of several ranks: reported by rank 0, refused on all of them."""

from __future__ import annotations

import csv
import socket
from pathlib import Path

import pytest

from evenstride.testing import RankPool
from evenstride.trace.read import read_records
from tests.messages import check_message
from tests.multiproc.refusals import settings
from tests.multiproc.telling import METRICS, burdened, in_own_steps, reported


def test_rank_0_reports_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra prometheus")
    path = tmp_path / "metrics.csv"

    leading, other = ranks.run(reported, 2, [f"csv:{path}", "prometheus:0"])

    assert (len(leading["sinks"]), other["sinks"]) == (2, [])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for metric in METRICS:
        labels = {row["label"] for row in rows if row["metric"] == metric}
        assert labels == set(leading["names"]), metric
        assert f"evenstride_{metric}" in leading["pages"][0]
    shares = [float(row["value"]) for row in rows if row["metric"] == "worker_share_samples"]
    assert [sum(pair) for pair in zip(shares[::2], shares[1::2], strict=True)] == [12.0] * (
        len(shares) // 2
    )
    means = [(row["step"], row["value"]) for row in rows if row["label"] == "loss"]
    assert means == [(str(20 * epoch), "0.5") for epoch in range(1, len(means) + 1)]
    assert len(means) >= 2


def test_a_port_in_use_is_refused_on_every_rank(ranks: RankPool) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra prometheus")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        asked = {"global_batch": 8, "sinks": f"prometheus:{taken.getsockname()[1]}"}

        one, other = ranks.run(settings, 2, [asked, asked])

    assert one == other
    assert one[0] == "ConfigError"
    check_message(one[1])


def test_an_invalid_sink_on_one_rank_is_refused_on_all(ranks: RankPool) -> None:
    one, other = ranks.run(settings, 2, [{"global_batch": 8}, {"global_batch": 8, "sinks": "x"}])

    assert one[0] == other[0] == "ConfigError"
    check_message(one[1], "'x'")
    check_message(other[1], "'x'")


@pytest.mark.alone
@pytest.mark.timeout(420)  # for a worker is named only after it was slow for a while
def test_a_rank_that_has_more_to_do_for_each_sample_is_named(
    ranks: RankPool, tmp_path: Path
) -> None:
    leading, other = ranks.run(burdened, 2, str(tmp_path), 20, timeout_s=400.0)

    named = [text for text in leading["log"] if "runs at" in text and "/1 " in text]
    alerts = [r for r in read_records(tmp_path) if r["kind"] == "alert"]
    slow = [a for a in alerts if a["alert"] == "slow" and a["worker"].endswith("/1")]

    assert named == [f"step {alert['step']}: {alert['reason']}" for alert in slow]
    assert not [text for text in other["log"] if "runs at" in text], "the leader names"
    alert = next(a for a in slow if a["step"] > leading["since"] > 0)
    assert alert["speed"] < 0.7
    assert alert["now_s"] > alert["better_s"] > 0
    assert alert["costs_s"] > 0


def test_where_workers_do_not_keep_step_all_steps_are_the_leaders_own(
    ranks: RankPool, tmp_path: Path
) -> None:
    leading, _ = ranks.run(in_own_steps, 2, str(tmp_path))

    records = list(read_records(tmp_path))
    assert [one["step"] for one in records if one["kind"] == "metric"] == leading
    (ended,) = [one["summary"]["step"] for one in records if one["kind"] == "ended"]
    assert ended == leading[-1]
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["metric"] == "metric"] == leading
    steps = [int(row["value"]) for row in rows if row["metric"] == "step"]
    assert steps == sorted(steps)
    assert 0 < steps[-1] <= leading[-1]
