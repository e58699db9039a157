"""Settings of a `Stride` that cannot be, and those that only look odd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evenstride
from evenstride.errors import ConfigError, InfeasibleShares, UnknownPolicy
from evenstride.trace.read import read_records
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import numbered

REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no batch": ({"global_batch": 0}, ("global_batch is 0",)),
    "half a sample": ({"global_batch": 2.5}, ("global_batch is 2.5",)),
    "a batch in words": ({"global_batch": "8"}, ("global_batch is '8'",)),
    "a seed in words": ({"seed": "lucky"}, ("'lucky'",)),
    "half a seed": ({"seed": 0.5}, ("0.5",)),
    "no least share": ({"min_share": 0}, ("min_share is 0",)),
    "bounds that cross": ({"min_share": 3, "max_share": 2}, ("max_share", "min_share")),
    "shares for others": ({"policy": "static:1,3"}, ("1 workers",)),
    "shares that do not sum up": ({"policy": "static:3"}, ()),
    "a policy's argument": ({"policy": "uniform:2"}, ()),
    "a trace that cannot be": ({"trace": "/proc/nowhere"}, ()),
    "a least share in words": ({"min_share": "1"}, ("min_share is '1'",)),
    "a most share in words": ({"max_share": "4"}, ("max_share is '4'",)),
    "a broken most share": ({"max_share": 4.5}, ("max_share is 4.5",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_cannot_be_is_refused(make_stride: MakeStride, name: str) -> None:
    settings, complaint = REFUSED[name]

    with raises_message(ConfigError, *complaint):
        make_stride(**settings)


def test_a_batch_outside_the_bounds_is_refused_with_both_ends() -> None:
    with raises_message(InfeasibleShares, "9 samples") as refusal:
        evenstride.Stride(global_batch=9, max_share=8)

    error = refusal.value
    assert (error.total, error.at_least, error.at_most, error.workers) == (9, 1, 8, 1)


def test_an_unknown_policy_is_refused_with_the_available_ones() -> None:
    with raises_message(UnknownPolicy):
        evenstride.Stride(global_batch=9, policy="fair")


@pytest.mark.parametrize(
    "settings", [{"policy": "fair"}, {"max_share": 8}, {"seed": "lucky"}, {"policy": "static:8"}]
)
def test_a_refusal_leaves_no_trace(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        evenstride.Stride(global_batch=9, trace=tmp_path / "run", **settings)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("batch", [np.int64(4), torch.tensor(4), np.uint8(4)])
def test_a_whole_number_in_any_guise_is_one(make_stride: MakeStride, batch: Any) -> None:
    stride = make_stride(global_batch=batch, seed=batch)

    assert len(stride.loader(numbered(9))) == 3
    assert stride.state_dict()["global_batch"] == stride.state_dict()["seed"] == 4
    assert type(stride.state_dict()["seed"]) is int, "it goes into checkpoints"


@pytest.mark.parametrize("seed", [-1, 2**70])
def test_any_whole_number_is_a_seed(make_stride: MakeStride, seed: int) -> None:
    loader = make_stride(seed=seed).loader(numbered(9))

    assert len(next(iter(loader))[0]) == 4


def test_a_progress_file_that_cannot_be_written_is_refused(
    make_stride: MakeStride, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_EVENSTRIDE_PROGRESS", "/proc/nowhere/steps")

    with raises_message(ConfigError):
        make_stride()


def test_it_may_be_closed_twice(
    make_stride: MakeStride, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("_EVENSTRIDE_PROGRESS", str(tmp_path / "steps"))
    stride = make_stride(trace=tmp_path)

    stride.close()
    stride.close()

    assert stride.summary().step == 0
    assert [record["kind"] for record in read_records(tmp_path)][-1] == "ended"
