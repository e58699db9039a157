"""The verdicts of the GPU benchmark's parts for one card: right, and wrong in each way."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import gpu, gpu_verdicts
from benchmarks.gpu_features import FEATURES

Found = dict[str, Any]


def block(delayed: bool, busy_ms: float = 10.0, wait_ms: float = 2.0, **changed: Any) -> Found:
    """Return a block whose peer is 8 ms late, or not."""
    late_ms = 8.0 if delayed else 0.0
    found = {
        "delayed": delayed,
        "read_ms": [[busy_ms, wait_ms + late_ms]] * 3,
        "step_ms": 12.0 + late_ms,
        "held_ms": late_ms,
        "held_once_ms": late_ms,
    }
    return {**found, **changed}


def waits(late: Found, how: str = "ddp", **frames: int) -> Found:
    """Return findings of two rounds with such a delayed block."""
    counted = {"all": 0, "of evenstride": 0, **frames}
    blocks = [block(False), late, late, block(False)]
    return {"how": how, "blocks": blocks, "frames": counted, "alone_ms": 9.5}


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_wait_that_grows_by_the_delay_is_right(how: str) -> None:
    figures = gpu_verdicts.waits_figures(waits(block(True), how))

    assert figures["wrong"] == []
    assert figures["rounds"] == 2
    assert figures["busy_ratio"]["ratio"] == 1.0
    assert figures["added_wait_ms"] == figures["added_step_ms"] == figures["held_ms"] == 8.0


BUSY, STEP, DELAY, SUM = (
    "a late peer changes the busy time",
    "the wait does not grow by as much as the step",
    "the wait does not grow by the delay",
    "busy and waiting time do not add up to the step",
)


@pytest.mark.parametrize(
    ("late", "how", "wrong"),
    [
        (block(True, busy_ms=10.29), "ddp", []),
        (block(True, busy_ms=10.31), "ddp", [BUSY]),
        (block(True, busy_ms=9.69), "ddp", [BUSY]),
        (block(True, busy_ms=18.0, wait_ms=-6.0), "ddp", [BUSY, STEP, DELAY]),
        (block(True, held_ms=9.0), "ddp", [DELAY]),
        # Of FSDP2's delays some overlap with work, but not all, and there are no other waits.
        (block(True, held_ms=40.0), "fsdp", []),
        (block(True, held_ms=7.0, held_once_ms=1.0), "fsdp", [DELAY]),
        (block(True, held_ms=40.0, held_once_ms=9.0), "fsdp", [DELAY]),
        (block(True, step_ms=24.0), "ddp", [STEP, SUM]),
    ],
)
def test_each_fault_has_a_name(late: Found, how: str, wrong: list[str]) -> None:
    assert gpu_verdicts.waits_figures(waits(late, how))["wrong"] == wrong


@pytest.mark.parametrize(
    ("how", "alone_ms", "missing"),
    [
        ("ddp", 12.4, False),
        ("ddp", 12.6, True),
        ("fsdp", 12.6, True),
        ("ddp compiled", 12.6, False),
    ],
)
def test_the_busy_time_contains_the_work(how: str, alone_ms: float, missing: bool) -> None:
    found = {**waits(block(True), how, all=1), "alone_ms": alone_ms}

    wrong = gpu_verdicts.waits_figures(found)["wrong"]

    assert wrong == (["work is missing from the busy time"] if missing else [])


def test_steps_without_times_are_wrong() -> None:
    assert gpu_verdicts.waits_figures(waits(block(True, read_ms=[])))["wrong"] == [
        "evenstride read no time"
    ]


@pytest.mark.parametrize(
    ("how", "frames", "wrong"),
    [
        ("ddp compiled", {"all": 3}, []),
        ("ddp compiled", {}, ["torch compiled nothing"]),
        (
            "ddp compiled",
            {"all": 3, "of evenstride": 1},
            ["torch compiled functions of evenstride"],
        ),
    ],
)
def test_the_model_is_compiled_and_evenstride_is_not(
    how: str, frames: dict[str, int], wrong: list[str]
) -> None:
    assert gpu_verdicts.waits_figures(waits(block(True), how, **frames))["wrong"] == wrong


def priced(slower: float, marks_us: float = 12.0) -> Found:
    """Return findings with steps of 10 ms, which evenstride makes longer by a factor."""
    by_groups = {
        str(count): {
            "always": {
                "plain": [10.0] * 4,
                "again": [10.0] * 4,
                "evenstride": [10.0 + marks_us * count / 1000.0] * 4,
            },
            "later": {
                "plain": [10.0] * 4,
                "again": [10.0] * 4,
                "evenstride": [10.0 * slower] * 4,
            },
            "own_s": 1e-4,
        }
        for count in (3, 9, 33)
    }
    return {"by_groups": by_groups}


@pytest.mark.parametrize(("slower", "verdict"), [(1.0249, "met"), (1.0251, "OVER")])
def test_the_price_may_be_one_percent_and_the_own_time(slower: float, verdict: str) -> None:
    figures = gpu_verdicts.price_figures(priced(slower))

    assert {one["verdict"] for one in figures["by_groups"].values()} == {verdict}
    assert bool(figures["wrong"]) is (verdict == "OVER")
    assert figures["us_per_group"] == pytest.approx(12.0)


def test_a_price_that_varies_too_much_is_unresolved() -> None:
    found = priced(1.0)
    found["by_groups"]["3"]["later"]["evenstride"] = [9.0, 10.0, 11.0, 12.0]

    figures = gpu_verdicts.price_figures(found)

    assert figures["by_groups"]["3"]["verdict"] == "unresolved"
    assert figures["wrong"] == []


SIZES = {"last_steps": [3, 7], "modelled": [1, 2, 5, 6, 7]}
RIGHT: dict[str, Found] = {
    "sizes": SIZES,
    "sizes compiled": SIZES,
    "memory": {"batch": 8, "sizes": [0, 4, 4], "error": 1e-15},
    "checkpoint": {
        "saved_at": 3,
        "restored_at": 3,
        "fresh_differs": 0.5,
        "weights_differ": 0.0,
        "next_differs": 1e-7,
    },
    "mean": {"means": [1.5, 2.5], "expected": [1.5, 2.5]},
    "precision": {
        "weights_differ": 1e-6,
        "losses": [1.0, float("inf")],
        "committed": 2,
        "scale": 128.0,
    },
    "graph": {"weights_differ": 1e-6, "modelled": [3]},
    "whole graph": {"error": "use make_graphed_callables"},
}


def test_features_that_did_what_they_should_are_right() -> None:
    assert RIGHT.keys() == FEATURES.keys()
    figures = gpu_verdicts.features_figures({"features": RIGHT})

    assert figures["wrong"] == []
    assert gpu_verdicts.features_lines({"features": RIGHT}, figures)[-1] == "as expected"


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("sizes", {"modelled": [0, 1, 2, 7]}),
        ("sizes", {"modelled": [1, 2, 3, 7]}),
        ("sizes compiled", {"modelled": [1, 2]}),
        ("memory", {"sizes": [8]}),
        ("memory", {"sizes": [4, 4]}),
        ("memory", {"sizes": [0, 4]}),
        ("memory", {"error": 1e-9}),
        ("memory", {"error": float("nan")}),
        ("checkpoint", {"restored_at": 0}),
        ("checkpoint", {"fresh_differs": 0.0}),
        ("checkpoint", {"weights_differ": 1e-9}),
        ("checkpoint", {"next_differs": 1e-3}),
        ("mean", {"means": [1.5, 2.6]}),
        ("precision", {"weights_differ": 1e-3}),
        ("precision", {"losses": [float("nan"), float("inf")]}),
        ("precision", {"losses": [1.0, 1.0]}),
        ("precision", {"committed": 1}),
        ("precision", {"scale": 256.0}),
        ("graph", {"weights_differ": 1e-3}),
        ("graph", {"modelled": []}),
        ("whole graph", {"error": ""}),
        ("mean", {"failed": "Traceback\nValueError: no\n"}),
    ],
)
def test_a_feature_that_did_something_else_is_wrong(name: str, changed: Found) -> None:
    figures = gpu_verdicts.features_figures(
        {"features": {**RIGHT, name: {**RIGHT[name], **changed}}}
    )

    assert figures["wrong"] != []
    assert all(one.startswith(f"{name}: ") for one in figures["wrong"])


@pytest.mark.parametrize("wrong", [[], ["a late peer changes the busy time"]])
def test_a_wrong_verdict_makes_the_run_bad(wrong: list[str]) -> None:
    assert gpu.bad({"figures": {"wrong": wrong}}) is bool(wrong)
    assert gpu.bad({"figures": {}}) is False
    assert gpu.bad({"failed": "late"}) is True
