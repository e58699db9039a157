"""What a worker is made of, and what its model is watched for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from evenstride.runtime import resources
from evenstride.runtime.resources import _quota_cores, measured_flops_per_s, usable_cores
from evenstride.runtime.timing import StepTimer
from evenstride.runtime.watch import watch_forward


def _written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(("limit", "cores"), [("150000 100000", 1.5), ("max 100000", None)])
def test_the_quota_of_a_second_version_group_is_read(
    tmp_path: Path, limit: str, cores: float | None
) -> None:
    _written(tmp_path / "membership", "0::/jobs/mine\n")
    _written(tmp_path / "root/jobs/mine/cpu.max", limit + "\n")

    assert _quota_cores(tmp_path / "membership", tmp_path / "root") == cores


@pytest.mark.parametrize(("quota", "cores"), [("5000", 0.25), ("-1", None)])
def test_the_quota_of_a_first_version_group_is_read(
    tmp_path: Path, quota: str, cores: float | None
) -> None:
    _written(tmp_path / "membership", "4:memory:/m\n3:cpu,cpuacct:/mine\n0::/elsewhere\n")
    _written(tmp_path / "root/cpu/mine/cpu.cfs_quota_us", quota)
    _written(tmp_path / "root/cpu/mine/cpu.cfs_period_us", "20000")

    assert _quota_cores(tmp_path / "membership", tmp_path / "root") == cores


@pytest.mark.parametrize("membership", ["0::/nowhere\n", "nonsense\n", "", "3:cpu:/nowhere\n"])
def test_where_no_quota_can_be_read_there_is_none(tmp_path: Path, membership: str) -> None:
    _written(tmp_path / "membership", membership)

    assert _quota_cores(tmp_path / "membership", tmp_path / "root") is None
    assert _quota_cores(tmp_path / "missing", tmp_path / "root") is None


def test_usable_cores_are_no_more_than_the_threads() -> None:
    assert 0 < usable_cores() <= torch.get_num_threads()


def test_the_speed_of_a_product_is_that_of_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter([0.0, 4.0, 10.0, 12.0, 20.0, 20.5, 30.0, 33.0, 40.0, 41.0])
    monkeypatch.setattr(resources, "time", SimpleNamespace(perf_counter=lambda: next(times_s)))

    assert measured_flops_per_s(torch.device("cpu"), size=10) == 2 * 10**3 / 0.5


def test_a_bare_model_among_several_ranks_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timer = StepTimer(lambda _: None)

    watch_forward(nn.Linear(1, 1), lambda: timer, world_size=1)
    assert not caplog.records
    watch_forward(nn.Linear(1, 1), lambda: timer, world_size=3)

    assert "nothing averages its gradients over the 3 ranks" in caplog.text


def test_a_model_with_a_wrapped_part_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    class Sharded(nn.Linear):
        def set_requires_gradient_sync(self, on: bool) -> None:
            raise NotImplementedError

    watch_forward(nn.Sequential(Sharded(1, 1)), lambda: StepTimer(print), world_size=3)

    assert not caplog.records
