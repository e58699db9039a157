"""How ``evenstride doctor --bench`` tells what it has measured, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evenstride.cli.commands.doctor import HOW_TO_GROUP, tell_bench
from evenstride.lab.doctor.bench_ranks import BenchBudget
from evenstride.testing.ranks import loopback_store
from tests.messages import check_message
from tests.unit.cli.conftest import Shell


def _rank(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "worker": f"node/{rank}",
        "architecture": "x86_64",
        "torch": "2.13.0+cu130",
        "kind": "cuda",
        "devices": ["NVIDIA L4"],
        "wheel": "CUDA 13.0 for sm_86",
        "capability": ["Ada, sm_89"],
        "bf16": ["native"],
        "compile": ["yes"],
        "unusable": "",
        "memory_bytes": [24 * 2**30],
        "backends": ["gloo", "nccl"],
    }


MACHINE = {
    "evenstride": "0.1.0",
    "python": "3.11.7",
    "torch": "2.13.0+cu130",
    "wheel": "CUDA 13.0 for sm_86",
    "numpy": "2.0.0",
    "system": "Linux",
}
OVERHEAD = {
    "plain_s": 0.02,
    "evenstride_s": 0.0201,
    "ratio": 1.0051,
    "ratio_interval": (1.001, 1.008),
    "control": 0.9998,
    "control_interval": (0.998, 1.002),
    "pairs": 12,
    "verdict": "met",
    "own_s": 0.00012,
}
BENCH: dict[str, Any] = {
    "ranks": [_rank(0), _rank(1)],
    "backend": "nccl",
    "global_batch": 256,
    "exactness": {
        "float64": {"error": 2e-16, "limit": 1e-12, "control": 0.76},
        "float32": {"error": 1e-7, "limit": 1e-5, "control": 0.76},
    },
    "timing": [
        {"share": 85, "true_s": 0.01, "step_s": 0.021, "read_s": 0.0101, "ratio": 1.01},
        {"share": 171, "true_s": 0.02, "step_s": 0.021, "read_s": None, "ratio": None},
    ],
    "waiting": {
        "share": 64,
        "balance_s": 0.008,
        "waiting_s": 0.0084,
        "ratio": 1.05,
        "ratio_interval": (1.04, 1.06),
        "step_s": [0.01, 0.018],
    },
    "balance": {
        "global_batch": 256,
        "equal_s": 0.03,
        "adaptive_s": 0.02,
        "speedup": 1.5,
        "speedup_interval": (1.4, 1.6),
        "bound_model": 1.55,
        "shares": [170, 86],
        "changes": 2,
        "blocks": 9,
    },
    "overhead": OVERHEAD,
    "wrong": [],
}
ALONE = {
    **BENCH,
    "ranks": [_rank(0)],
    "backend": "",
    "timing": None,
    "waiting": None,
    "balance": None,
}
REASON = "the float64 gradient of unequal shares is off by 3.0e-03"
WRONG = {
    **BENCH,
    "wrong": [REASON],
    "exactness": {"float64": {"error": 3e-3, "limit": 1e-12, "control": 0.76}},
}


def test_the_block_says_what_it_is_and_holds_every_part() -> None:
    output = tell_bench({**MACHINE, "bench": BENCH})

    first, blank, fence, *lines, end = output.splitlines()
    check_message(first, "0.1.0", "NVIDIA")
    assert (blank, fence, end) == ("", "```", "```")
    heads = [line[:12].rstrip() for line in lines]
    assert heads == [
        "versions",
        "rank 0",
        "rank 1",
        "exactness",
        "exactness",
        "timing",
        "timing",
        "waiting",
        "balance",
        "",
        "overhead",
        "",
        "wrong",
    ]
    for printed_elsewhere in (
        "NVIDIA L4 (Ada, sm_89), 24.0 GiB, bf16 native, compile yes; node/1, x86_64",
        "float64 off by 2.0e-16: exact (limit 1e-12; 7.6e-01 without weights)",
        "share 85: busy time 10.000 ms, evenstride measured 10.100 ms (median ratio 1.010)",
        "share 171: busy time 20.000 ms, no step was reported in time",
        "share 64: busy time 8.000 ms in balance, 8.400 ms while it waits for the ",
        "speed-up 1.500 (median of pairs, 95 % 1.400 to 1.600; bound 1.550",
        "shares 170/86, 2 change(s), 9 pairs",
        "ratio 1.0051 (median of pairs, 95 % 1.0010 to 1.0080)",
        "plain / plain 0.9998 (95 % 0.9980 to 1.0020), 12 pairs; under 1 %: met; own time ",
        "wrong       nothing",
    ):
        assert printed_elsewhere in output


def test_unknown_and_inexact_results_are_reported_as_such() -> None:
    unread = {**BENCH, "waiting": {**BENCH["waiting"], "waiting_s": None}}
    assert "share 64: no step was reported in time" in tell_bench({**MACHINE, "bench": unread})
    unknown = {**BENCH, "balance": {**BENCH["balance"], "bound_model": None}}

    assert "bound unknown" in tell_bench({**MACHINE, "bench": unknown})
    wrong = tell_bench({**MACHINE, "bench": WRONG})
    assert "off by 3.0e-03: NOT EXACT" in wrong
    assert f"wrong       {REASON}" in wrong


def test_one_process_is_reported_how_to_measure_the_rest() -> None:
    lines = tell_bench({**MACHINE, "bench": ALONE}).splitlines()

    check_message(lines[0], "0.1.0", "NVIDIA")
    assert lines[-2:] == ["```", HOW_TO_GROUP]
    assert "torchrun" in HOW_TO_GROUP
    assert HOW_TO_GROUP not in tell_bench({**MACHINE, "bench": BENCH})
    assert not any(line.startswith(("timing", "waiting", "balance")) for line in lines)


@pytest.fixture
def benched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A bench that has been run: what it finds, on which rank; and the plans it was given."""
    outcome: dict[str, Any] = {"rank": 0, "findings": BENCH, "asked": []}

    def run(world_size: int, plan: BenchBudget, tell: Any) -> tuple[int, dict[str, Any]]:
        outcome["asked"].append((world_size, plan))
        tell("measuring")
        return outcome["rank"], outcome["findings"]

    monkeypatch.setattr("evenstride.lab.doctor.checkup.examine_machine", lambda: dict(MACHINE))
    monkeypatch.setattr("evenstride.lab.doctor.bench_run.run_bench", run)
    return outcome


def test_a_check_without_problems_ends_with_0(shell: Shell, benched: dict[str, Any]) -> None:
    output, as_json = shell("doctor", "--bench"), shell("doctor", "--bench", "--json")

    assert (output.code, as_json.code) == (0, 0)
    assert output.out == tell_bench({**MACHINE, "bench": BENCH}) + "\n"
    assert output.err == "measuring\n"
    assert as_json.json() == json.loads(json.dumps({**MACHINE, "bench": BENCH}))
    assert [world_size for world_size, _ in benched["asked"]] == [1, 1]
    assert benched["asked"][0][1] == BenchBudget.of(90.0)


def test_a_check_with_a_problem_ends_with_1_and_the_reason(
    shell: Shell, benched: dict[str, Any]
) -> None:
    benched["findings"] = WRONG

    output = shell("doctor", "--bench")

    assert output.code == 1
    assert output.err == f"measuring\nwrong: {REASON}\n"
    assert output.out.startswith("### evenstride")


def test_other_ranks_are_silent_and_end_alike(
    shell: Shell, benched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    benched["rank"] = 1
    right = shell("doctor", "--bench", "--seconds", "12")
    benched["findings"] = WRONG
    wrong = shell("doctor", "--bench")

    assert (right.code, right.out) == (0, "")
    assert (wrong.code, wrong.out) == (1, "")
    assert REASON not in wrong.err
    assert benched["asked"][0] == (2, BenchBudget.of(12.0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EVENSTRIDE_MAX_STEPS", "3"),
        ("EVENSTRIDE_TRACE", "runs"),
        ("_EVENSTRIDE_PROGRESS", "steps"),
        ("EVENSTRIDE_CALIBRATE", "8:4"),
    ],
)
def test_what_would_change_the_runs_is_refused(
    shell: Shell, benched: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        refused = shell("doctor", "--bench").refusal()

    check_message(refused, name)
    assert benched["asked"] == []


@pytest.mark.parametrize("seconds", ["0", "0.5", "4000", "soon"])
def test_an_invalid_time_is_refused(shell: Shell, seconds: str) -> None:
    answer = shell("doctor", "--bench", "--seconds", seconds)

    assert (answer.code, answer.out) == (2, "")
    assert "--seconds" in answer.err


# The whole command on two ranks, as a launcher starts it, with runs as short as can be.
BROKEN = """
import sys
import evenstride.runtime.loss.training_step as scaling
from evenstride.cli.main import main
scaling.loss_factor = lambda *_: 1.0
sys.argv[1:] = ["doctor", "--bench", "--seconds", "1", "--json"]
main()
"""


def test_two_ranks_print_one_json_object_and_leave_nothing_behind(tmp_path: Path) -> None:
    outs = launched(["-m", "evenstride", "doctor", "--bench", "--seconds", "1", "--json"], tmp_path)

    assert [code for code, _, _ in outs] == [0, 0]
    assert outs[1][1] == ""
    assert outs[0][1].count("\n") == 1
    bench = json.loads(outs[0][1])["bench"]
    assert bench["wrong"] == []
    assert [mine["rank"] for mine in bench["ranks"]] == [0, 1]
    assert all(one["error"] <= one["limit"] for one in bench["exactness"].values())
    assert outs[0][2].startswith("exactness: ")
    assert "wrong" not in outs[0][2]
    assert not list(tmp_path.glob("evenstride*"))  # torch may leave caches of its own


def test_broken_weights_end_every_rank_with_1(tmp_path: Path) -> None:
    outs = launched(["-c", BROKEN], tmp_path)

    assert [code for code, _, _ in outs] == [1, 1]
    assert len(json.loads(outs[0][1])["bench"]["wrong"]) == 2
    check_message(outs[0][2])
    assert outs[1][1] == ""


def launched(arguments: list[str], temporary: Path) -> list[tuple[int, str, str]]:
    """Run two ranks; return the exit code, stdout and stderr of each."""
    with loopback_store() as port:
        processes = [
            subprocess.Popen(
                [sys.executable, *arguments],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                    "RES_OPTIONS": "timeout:1 attempts:1",
                    "TMPDIR": str(temporary),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            output = [process.communicate(timeout=100) for process in processes]
        finally:
            for process in processes:
                process.kill()
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, output, strict=True)]
