"""CPU limits by control groups, on file systems that behave as the kernel's do."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from evenstride.errors import LimitError
from evenstride.lab.processes.cpu_limits import CgroupFiles, CgroupLimits
from tests.messages import raises_message
from tests.unit.lab.fake_cgroups import FakeGroup, GroupV1, GroupV2

VERSIONS: list[tuple[str, type[FakeGroup]]] = [("cgroup v1", GroupV1), ("cgroup v2", GroupV2)]
both = pytest.mark.parametrize(("kind", "version"), VERSIONS, ids=["v1", "v2"])


def _quota(base: FakeGroup, worker: int) -> float | None:
    """Return the part of a core that a worker's group allows; ``None`` without a limit."""
    (group,) = Path(base).glob(f"evenstride-*/worker-{worker}")
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
    else:
        quota = (group / "cpu.cfs_quota_us").read_text().strip()
        period = (group / "cpu.cfs_period_us").read_text().strip()
    return None if quota in {"max", "-1"} else int(quota) / int(period)


def _period_us(base: FakeGroup) -> int:
    (group,) = Path(base).glob("evenstride-*/worker-0")
    if (group / "cpu.max").exists():
        return int((group / "cpu.max").read_text().split()[1])
    return int((group / "cpu.cfs_period_us").read_text())


@both
def test_each_worker_gets_the_quota_of_its_speed(
    tmp_path: Path, kind: str, version: type[FakeGroup]
) -> None:
    base = version.hierarchy(tmp_path / "cpu")
    limits = CgroupLimits(CgroupFiles(kind, base), 3)

    for worker, speed in enumerate((0.25, 1.0, 0.1)):
        limits.set_speed(worker, speed)

    assert limits.kind == kind
    assert [_quota(base, worker) for worker in range(3)] == [0.25, None, 0.1]
    limits.set_speed(0, 1.0)
    assert _quota(base, 0) is None
    limits.close()


@both
@pytest.mark.parametrize("speed", [0.9, 0.1, 0.08, 0.05, 0.01])
def test_slow_workers_get_longer_periods_rather_than_quotas_that_kernels_refuse(
    tmp_path: Path, kind: str, version: type[FakeGroup], speed: float
) -> None:
    base = version.hierarchy(tmp_path / "cpu")
    limits = CgroupLimits(CgroupFiles(kind, base), 1)

    limits.set_speed(0, speed)  # the fake refuses less than 1 ms

    assert _quota(base, 0) == pytest.approx(speed)
    assert _period_us(base) == pytest.approx(max(10_000, 1_000 / speed))
    limits.close()


@both
def test_a_process_joins_its_worker_and_is_moved_out_before_the_groups_go(
    tmp_path: Path, kind: str, version: type[FakeGroup]
) -> None:
    base = version.hierarchy(tmp_path / "cpu")
    limits = CgroupLimits(CgroupFiles(kind, base), 2)

    limits.join(1, 4711)

    (group,) = base.glob("evenstride-*/worker-1")
    assert group.processes() == ["4711"]
    limits.close()
    assert base.groups() == []
    assert base.processes() == ["4711"]


@both
def test_a_process_that_leaves_its_worker_has_no_limit(
    tmp_path: Path, kind: str, version: type[FakeGroup]
) -> None:
    base = version.hierarchy(tmp_path / "cpu")
    limits = CgroupLimits(CgroupFiles(kind, base), 2)
    limits.set_speed(0, 0.1)
    limits.join(0, 4711)

    limits.leave(4711)

    (free,) = base.glob("evenstride-*/free")
    assert free.processes() == ["4711"]
    quota = free / ("cpu.max" if kind == "cgroup v2" else "cpu.cfs_quota_us")
    assert quota.read_text().split()[0] in {"max", "-1"}
    limits.close()
    assert base.groups() == []
    assert base.processes() == ["4711"]


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    base = GroupV1.hierarchy(tmp_path / "cpu")
    limits = CgroupLimits(CgroupFiles("cgroup v1", base), 2)

    limits.close()
    limits.close()

    assert base.groups() == []


class Deaf(GroupV1):
    """Takes a quota without a word and keeps its own."""

    __slots__ = ()

    def accept(self, text: str) -> None:
        if self.name != "cpu.cfs_quota_us":
            super().accept(text)


class DeafV2(GroupV2):
    __slots__ = ()

    def accept(self, text: str) -> None:
        if self.name != "cpu.max":
            super().accept(text)


@pytest.mark.parametrize(("kind", "version"), [("cgroup v1", Deaf), ("cgroup v2", DeafV2)])
def test_a_quota_that_is_refused_without_a_word_is_noticed(
    tmp_path: Path, kind: str, version: type[FakeGroup]
) -> None:
    base = version.hierarchy(tmp_path / "cpu")

    with raises_message(LimitError, "10000"):
        CgroupLimits(CgroupFiles(kind, base), 2)

    assert base.groups() == []


def test_a_quota_that_is_refused_later_is_reported(tmp_path: Path) -> None:
    base = GroupV1.hierarchy(tmp_path / "cpu")
    limits = CgroupLimits(CgroupFiles("cgroup v1", base), 1)
    (quota,) = Path(base).glob("*/worker-0/cpu.cfs_quota_us")
    quota.unlink()  # as when another program removes the group

    with raises_message(LimitError, "'5000'"):
        limits.set_speed(0, 0.5)

    limits.close()
    assert base.groups() == []


def test_a_process_that_is_gone_cannot_join(tmp_path: Path) -> None:
    class Forgetful(GroupV1):
        __slots__ = ()

        def write_text(self, data: str, *_: Any, **__: Any) -> int:
            if self.name == "cgroup.procs":
                raise ProcessLookupError(errno.ESRCH, "No such process", str(self))
            return super().write_text(data)

    base = Forgetful.hierarchy(tmp_path / "cpu")
    limits = CgroupLimits(CgroupFiles("cgroup v1", base), 1)

    with raises_message(LimitError, "4711"):
        limits.join(0, 4711)

    limits.close()
    assert base.groups() == []


class OnlyTwo(GroupV1):
    """Refuses the third worker's group, as a limit on the number of groups would."""

    __slots__ = ()

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if self.name == "worker-2":
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable", str(self))
        super().mkdir(mode, parents, exist_ok)


class Undelegated(GroupV2):
    """Lets groups be made, but not limited."""

    __slots__ = ()

    def accept(self, text: str) -> None:
        if self.name == "cgroup.subtree_control" and not self.parent.name.startswith("evenstride"):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        super().accept(text)


class ReadOnly(GroupV1):
    __slots__ = ()

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if self.name.startswith("evenstride"):
            raise OSError(errno.EROFS, "Read-only file system", str(self))
        super().mkdir(mode, parents, exist_ok)


@pytest.mark.parametrize(
    ("kind", "version", "why"),
    [
        ("cgroup v1", OnlyTwo, "Resource temporarily unavailable"),
        ("cgroup v2", Undelegated, "Permission denied"),
        ("cgroup v1", ReadOnly, "Read-only file system"),
    ],
    ids=["the third group", "the controller", "every group"],
)
def test_a_set_up_that_fails_half_way_leaves_no_group(
    tmp_path: Path, kind: str, version: type[FakeGroup], why: str
) -> None:
    base = version.hierarchy(tmp_path / "cpu")

    with raises_message(LimitError, why):
        CgroupLimits(CgroupFiles(kind, base), 3)

    assert base.groups() == []


def test_a_group_that_stays_busy_for_a_moment_is_removed_all_the_same(tmp_path: Path) -> None:
    refusals = ["once", "twice"]

    class Busy(GroupV1):
        __slots__ = ()

        def rmdir(self) -> None:
            if self.name == "worker-0" and refusals:
                refusals.pop()
                raise OSError(errno.EBUSY, "Device or resource busy", str(self))
            super().rmdir()

    base = Busy.hierarchy(tmp_path / "cpu")

    CgroupLimits(CgroupFiles("cgroup v1", base), 1).close()

    assert base.groups() == []
