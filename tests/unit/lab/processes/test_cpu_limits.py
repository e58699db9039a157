"""The best limits that are permitted, and the sentence on why there are no better ones."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstride.lab.processes.cpu_limits import CgroupFiles, open_limits
from tests.messages import check_message
from tests.unit.lab.fake_cgroups import GroupV1


class NotOurs(GroupV1):
    """A hierarchy in which this user may make no group."""

    __slots__ = ()

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if self.name.startswith("evenstride"):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        super().mkdir(mode, parents, exist_ok)


def _offer(monkeypatch: pytest.MonkeyPatch, *found: CgroupFiles) -> None:
    def candidates() -> Iterator[CgroupFiles]:
        yield from found

    monkeypatch.setattr("evenstride.lab.processes.cpu_limits.cgroup_candidates", candidates)


def test_control_groups_are_taken_without_a_word_where_they_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = GroupV1.hierarchy(tmp_path / "cpu")
    _offer(monkeypatch, CgroupFiles("cgroup v1", base))

    limits, caveat = open_limits(2)

    assert (limits.kind, caveat) == ("cgroup v1", "")
    limits.close()
    assert base.groups() == []


def test_the_next_hierarchy_is_tried_where_the_first_is_not_permitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = NotOurs.hierarchy(tmp_path / "cpu"), GroupV1.hierarchy(tmp_path / "other")
    _offer(monkeypatch, CgroupFiles("cgroup v1", first), CgroupFiles("cgroup v1", second))

    limits, caveat = open_limits(1)

    assert (limits.kind, caveat) == ("cgroup v1", "")
    assert len(second.groups()) == 3  # the whole, the worker's, and that of the free
    limits.close()
    assert first.groups() == second.groups() == []


def test_without_permission_signals_are_used_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = NotOurs.hierarchy(tmp_path / "cpu")
    _offer(monkeypatch, CgroupFiles("cgroup v1", base))

    limits, caveat = open_limits(2)
    limits.close()

    assert limits.kind == "signals"
    check_message(caveat, base)
    assert "Permission denied" in caveat
    assert base.groups() == []


def test_without_control_groups_signals_are_used_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _offer(monkeypatch)

    limits, caveat = open_limits(1)
    limits.close()

    assert limits.kind == "signals"
    check_message(caveat)
