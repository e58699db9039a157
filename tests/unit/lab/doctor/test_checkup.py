"""What ``evenstride doctor`` measures and tells."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import evenstride
from evenstride.lab.doctor.checkup import examine_machine, gradient_error, reduce_s, tell
from evenstride.testing import RankPool
from tests.messages import check_message
from tests.unit.cli.commands.test_doctor_bench import launched
from tests.unit.lab.fake_runs import SpyLimits

PORT = {"address": "127.0.0.1", "pid": 7, "is_open": False}
GROUP: dict[str, Any] = {
    "ranks": [
        {
            "rank": rank,
            "worker": f"node-{rank}",
            "architecture": "x86_64",
            "torch": "2.13.0",
            "devices": ["cpu"],
            "gflops_per_s": 50.0 / (rank + 1),
            "ports": [{**PORT, "port": 29400 + rank, "process": f"rank {rank}"}],
        }
        for rank in range(2)
    ],
    "gradient_error": 3e-16,
    "exact": True,
    "all_reduce_latency_s": 0.00025,
    "all_reduce_bytes_per_s": 800e6,
    "slow": ["node-1"],
    "same_torch": True,
}


def test_a_machine_is_examined_without_leaving_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = SpyLimits()
    monkeypatch.setattr(
        "evenstride.lab.doctor.checkup.open_limits", lambda _: (limits, "Only numbers.")
    )

    findings = examine_machine()

    assert limits.closed == 1
    assert findings["cpu_limits"] == "numbers"
    assert findings["cpu_limits_caveat"] == "Only numbers."
    assert findings["evenstride"] == evenstride.__version__
    assert findings["architecture"] == os.uname().machine
    assert "gloo" in findings["backends"]
    assert 0 < findings["cores"] <= len(os.sched_getaffinity(0))
    assert json.loads(json.dumps(findings)) == findings


def test_findings_are_one_line_each_in_words() -> None:
    text = tell({"cores": 2.0, "bf16_on_device": False, "backends": ["gloo", "mpi"]})

    assert text.splitlines() == [
        "cores                2.0",
        "bf16_on_device       no",
        "backends             gloo, mpi",
    ]


def test_a_group_is_shown_rank_by_rank_with_the_names_of_slow_ranks() -> None:
    lines = tell({"cores": 2.0, "group": GROUP}).splitlines()

    assert "2 ranks" in lines
    assert [line.split()[-2] for line in lines if line.startswith("  rank")] == ["50.0", "25.0"]
    check_message(lines, "3.0e-16", "0.25 ms", "800 MB", "4 MiB")
    assert "slow ranks           node-1" in lines
    assert not any("warning" in line for line in lines)


def test_problems_of_a_group_stand_out() -> None:
    wrong = {**GROUP, "exact": False, "gradient_error": 0.76, "same_torch": False, "slow": []}

    text = tell({"group": wrong})

    check_message(text, "7.6e-01")
    assert "slow ranks           none" in text


def _errors(rank: int) -> tuple[float, float]:
    right = gradient_error()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenstride.lab.doctor.checkup.loss_factor", lambda *_: 1.0)
        return right, gradient_error()


def test_weighted_gradients_are_exact_and_plain_ones_are_seen_not_to_be(ranks: RankPool) -> None:
    answers = ranks.run(_errors, 2)

    for right, plain in answers:
        assert right <= 1e-12
        assert plain > 0.1


def _reduces(rank: int) -> tuple[float, float]:
    return reduce_s(2), reduce_s(2**20)


def test_large_reductions_take_longer_than_small_ones(ranks: RankPool) -> None:
    small_s, large_s = ranks.run(_reduces, 2)[0]

    assert 0 < small_s < large_s


# The whole command on a rank whose speed is a given number.
DOCTOR = """
import os, sys
import evenstride.lab.doctor.checkup as checkup
from evenstride.cli.main import main
checkup.measured_flops_per_s = lambda _: 10e9 / (1 + int(os.environ["RANK"]))
sys.argv[1:] = ["doctor", "--json"]
main()
"""


def test_doctor_in_a_group_prints_one_json_object_on_rank_0_only(tmp_path: Path) -> None:
    (_, first, _), (_, second, _) = launched(["-c", DOCTOR], tmp_path)

    assert second == ""
    assert first.count("\n") == 1
    group = json.loads(first)["group"]
    assert group["exact"] is True
    assert [mine["rank"] for mine in group["ranks"]] == [0, 1]
    assert [mine["gflops_per_s"] for mine in group["ranks"]] == [10.0, 5.0]
    assert group["slow"] == [group["ranks"][1]["worker"]]
    assert group["same_torch"] is True
    assert group["all_reduce_latency_s"] > 0
