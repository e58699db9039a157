"""Where control groups are found, and what a killed lab has left in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evenstride.lab.processes.cpu_limits import CgroupFiles, CgroupLimits, cgroup_candidates
from tests.unit.lab.fake_cgroups import GroupV1

MOUNTS_V1 = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup {root}/cpu cgroup rw,cpu,cpuacct 0 0\n"
MOUNTS_V2 = "cgroup2 {root}/unified cgroup2 rw,nosuid 0 0\n"


def _found(tmp_path: Path, mounts: str, membership: str) -> list[tuple[str, str]]:
    (tmp_path / "mounts").write_text(mounts.format(root=tmp_path))
    (tmp_path / "membership").write_text(membership)
    found = cgroup_candidates(tmp_path / "mounts", tmp_path / "membership")
    return [(files.kind, str(files.base.relative_to(tmp_path))) for files in found]


def _unified(tmp_path: Path, group: str, controllers: str) -> None:
    folder = tmp_path / "unified" / group
    folder.mkdir(parents=True)
    (folder / "cgroup.controllers").write_text(controllers)


def test_version_1_is_found_in_the_group_this_process_is_in(tmp_path: Path) -> None:
    found = _found(tmp_path, MOUNTS_V1, "5:memory:/other\n4:cpu,cpuacct:/user/me\n")

    assert found == [("cgroup v1", "cpu/user/me")]


def test_version_2_is_found_where_it_may_limit_the_cpu(tmp_path: Path) -> None:
    _unified(tmp_path, "user", "cpuset cpu io\n")

    assert _found(tmp_path, MOUNTS_V2, "0::/user\n") == [("cgroup v2", "unified/user")]


def test_version_2_without_the_cpu_is_passed_over(tmp_path: Path) -> None:
    _unified(tmp_path, "user", "cpuset io\n")

    assert _found(tmp_path, MOUNTS_V2, "0::/user\n") == []


def test_version_1_comes_first_where_there_are_both(tmp_path: Path) -> None:
    _unified(tmp_path, "", "cpu\n")

    found = _found(tmp_path, MOUNTS_V2 + MOUNTS_V1, "4:cpu:/\n0::/\n")

    assert found == [("cgroup v1", "cpu"), ("cgroup v2", "unified")]


@pytest.mark.parametrize("membership", ["", "3:memory:/\n"], ids=["no group", "another one"])
def test_a_process_in_no_cpu_group_has_none(tmp_path: Path, membership: str) -> None:
    assert _found(tmp_path, MOUNTS_V1 + MOUNTS_V2, membership) == []


def test_a_system_without_control_groups_has_none(tmp_path: Path) -> None:
    assert list(cgroup_candidates(tmp_path / "no mounts", tmp_path / "no membership")) == []


def _left_behind(base: GroupV1, pid: int) -> GroupV1:
    top = base / f"evenstride-{pid}-1"
    top.mkdir()
    for worker in range(2):
        (top / f"worker-{worker}").mkdir()
    (top / "worker-1" / "cgroup.procs").write_text("4711\n")
    return top


def test_groups_of_a_lab_that_was_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    base = GroupV1.hierarchy(tmp_path / "cpu")
    never = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    _left_behind(base, never)

    CgroupLimits(CgroupFiles("cgroup v1", base), 1).close()

    assert base.groups() == []
    assert base.processes() == ["4711"]


def test_groups_of_a_lab_that_is_still_at_work_are_left_alone(tmp_path: Path) -> None:
    base = GroupV1.hierarchy(tmp_path / "cpu")
    top = _left_behind(base, os.getppid())
    (base / "evenstride-of-someone-else").mkdir()

    CgroupLimits(CgroupFiles("cgroup v1", base), 1).close()

    kept = {"evenstride-of-someone-else", top.name, f"{top.name}/worker-0", f"{top.name}/worker-1"}
    assert set(base.groups()) == kept
