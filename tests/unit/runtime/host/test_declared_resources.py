"""The measured resources of a worker."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch

from evenstride.runtime.host import machine_resources
from evenstride.runtime.host.machine_resources import (
    comparable,
    fastest_flops_per_s,
    measured_flops_per_s,
    quota_cores,
    usable_cores,
)


def _written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(("limit", "cores"), [("150000 100000", 1.5), ("max 100000", None)])
def test_the_quota_of_a_cgroup_v2_is_read(tmp_path: Path, limit: str, cores: float | None) -> None:
    _written(tmp_path / "membership", "0::/jobs/mine\n")
    _written(tmp_path / "root/jobs/mine/cpu.max", limit + "\n")

    assert quota_cores(tmp_path / "membership", tmp_path / "root") == cores


@pytest.mark.parametrize(("quota", "cores"), [("5000", 0.25), ("-1", None)])
def test_the_quota_of_a_cgroup_v1_is_read(tmp_path: Path, quota: str, cores: float | None) -> None:
    _written(tmp_path / "membership", "4:memory:/m\n3:cpu,cpuacct:/mine\n0::/elsewhere\n")
    _written(tmp_path / "root/cpu/mine/cpu.cfs_quota_us", quota)
    _written(tmp_path / "root/cpu/mine/cpu.cfs_period_us", "20000")

    assert quota_cores(tmp_path / "membership", tmp_path / "root") == cores


@pytest.mark.parametrize("membership", ["0::/nowhere\n", "nonsense\n", "", "3:cpu:/nowhere\n"])
def test_an_unreadable_quota_is_ignored(tmp_path: Path, membership: str) -> None:
    _written(tmp_path / "membership", membership)

    assert quota_cores(tmp_path / "membership", tmp_path / "root") is None
    assert quota_cores(tmp_path / "missing", tmp_path / "root") is None


def test_usable_cores_are_limited_by_the_threads() -> None:
    assert 0 < usable_cores() <= torch.get_num_threads()


def test_the_speed_of_a_product_is_that_of_the_fastest() -> None:
    times_s = iter([0.5, 4.0, 9.0, 2.0, 0.5, 3.0, 1.0])

    assert fastest_flops_per_s(lambda _: next(times_s)) == 2 * 256**3 / 0.5


@pytest.mark.parametrize("flops_per_s", [5e9, 5.5e12, 65e12, 600e12])
def test_the_start_time_of_a_product_does_not_hide_a_difference_between_devices(
    flops_per_s: float,
) -> None:
    def product_s(size: int) -> float:
        return 20e-6 + 2 * size**3 / flops_per_s

    assert fastest_flops_per_s(product_s) == pytest.approx(flops_per_s, rel=0.02)


def test_a_device_whose_clock_stands_still_is_not_measured_forever() -> None:
    sizes: list[int] = []

    def product_s(size: int) -> float:
        sizes.append(size)
        return 1e-9

    fastest_flops_per_s(product_s)

    assert max(sizes) == 8192


def test_products_are_measured_in_the_dtype_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()

    def matmul(a: torch.Tensor, b: torch.Tensor) -> None:
        seen.update((a.dtype, b.dtype))

    monkeypatch.setattr(torch, "matmul", matmul)
    seconds = count()
    monkeypatch.setattr(
        "evenstride.runtime.host.machine_resources.time.perf_counter", lambda: next(seconds)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured_flops_per_s(torch.device("cpu"))
    assert seen == {torch.bfloat16}

    seen.clear()
    measured_flops_per_s(torch.device("cpu"))
    assert seen == {torch.float32}


@pytest.mark.parametrize(("kind", "waits"), [("cpu", 0), ("cuda", 2), ("xpu", 2)])
def test_the_clock_waits_for_a_device_that_works_asynchronously(
    monkeypatch: pytest.MonkeyPatch, kind: str, waits: int
) -> None:
    waited: list[torch.device] = []
    made = torch.zeros(2, 2)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: made)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(machine_resources, "fastest_flops_per_s", lambda product_s: product_s(2))

    measured_flops_per_s(torch.device(kind))

    assert waited == waits * [torch.device(kind)], "before the clock starts and before it stops"


def test_cores_count_only_if_all_workers_are_cpus() -> None:
    cpu, other = {"cores": 4.0, "flops_per_s": 5e10}, {"cores": 1.0, "flops_per_s": 5e10}
    gpu = {"flops_per_s": 5e12}

    assert comparable([cpu, other]) == [{"cores": 4.0}, {"cores": 1.0}]
    assert comparable([cpu, gpu]) == [cpu, gpu]
    assert comparable([{}, {}]) == [{}, {}]
