"""Folders that behave as the kernel's control groups do, where anyone may make them.

A group comes with its files, writes are checked and may be refused, a process is in one group
at a time, and only an empty group can be removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path, PosixPath
from typing import Any, TypeVar

LEAST_QUOTA_US = 1000

GroupT = TypeVar("GroupT", bound="FakeGroup")


class FakeGroup(PosixPath):
    """A control group, or a file in one; the subclasses are the two versions."""

    __slots__ = ()

    @classmethod
    def files(cls, parent: Path, /) -> dict[str, str]:
        """Return the files that a new group below ``parent`` comes with."""
        raise NotImplementedError

    @classmethod
    def hierarchy(cls: type[GroupT], folder: Path) -> GroupT:
        """Return a new hierarchy without any group but its root."""
        base = cls(folder)
        base.mkdir(parents=True)
        return base

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        super().mkdir(mode, parents, exist_ok)
        for name, text in self.files(Path(self.parent)).items():
            Path(self / name).write_text(text)

    def rmdir(self) -> None:
        names = os.listdir(self)  # noqa: PTH208  plain names, not groups
        plain = [Path(self) / name for name in names]
        if self.processes() or any(path.is_dir() for path in plain):
            raise OSError(errno.EBUSY, "Device or resource busy", str(self))
        for path in plain:
            path.unlink()
        super().rmdir()

    def write_text(self, data: str, *_: Any, **__: Any) -> int:
        if not self.exists():
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        if self.name == "cgroup.procs":
            self._move(data.strip())
        else:
            self.accept(data.strip())
        return len(data)

    def accept(self, text: str) -> None:
        """Take a setting, or refuse it as the kernel would."""
        raise NotImplementedError

    def keep(self, text: str) -> None:
        """Store a setting that was accepted."""
        Path(self).write_text(f"{text}\n")

    def processes(self) -> list[str]:
        """Return the processes in this group."""
        with contextlib.suppress(FileNotFoundError):
            return (Path(self) / "cgroup.procs").read_text().split()
        return []

    def groups(self) -> list[str]:
        """Return the groups below this one."""
        return sorted(
            str(path.relative_to(self)) for path in Path(self).rglob("*") if path.is_dir()
        )

    def _move(self, pid: str) -> None:
        top = Path(self).parent
        while (top.parent / "cgroup.procs").exists():
            top = top.parent
        for members in (top / "cgroup.procs", *top.rglob("cgroup.procs")):
            others = [other for other in members.read_text().split() if other != pid]
            members.write_text("".join(f"{other}\n" for other in others))
        with Path(self).open("a") as file:
            file.write(f"{pid}\n")


class GroupV1(FakeGroup):
    """Version 1: quota and period are files of their own."""

    __slots__ = ()

    @classmethod
    def files(cls, _: Path, /) -> dict[str, str]:
        return {"cgroup.procs": "", "cpu.cfs_period_us": "100000\n", "cpu.cfs_quota_us": "-1\n"}

    def accept(self, text: str) -> None:
        number = int(text)
        if number < LEAST_QUOTA_US and not (self.name == "cpu.cfs_quota_us" and number == -1):
            raise OSError(errno.EINVAL, "Invalid argument", str(self))
        self.keep(text)


class GroupV2(FakeGroup):
    """Version 2: a group can be limited once its parent hands the controller on."""

    __slots__ = ()

    @classmethod
    def files(cls, parent: Path, /) -> dict[str, str]:
        common = {"cgroup.procs": "", "cgroup.subtree_control": "", "cgroup.controllers": ""}
        control = parent / "cgroup.subtree_control"
        if not control.exists():
            return {**common, "cgroup.controllers": "cpu io memory\n"}
        return common | ({"cpu.max": "max 100000\n"} if "cpu" in control.read_text() else {})

    def accept(self, text: str) -> None:
        if self.name == "cgroup.subtree_control":
            self._hand_on(text)
            return
        quota, period = text.split()
        if int(period) < LEAST_QUOTA_US or (quota != "max" and int(quota) < LEAST_QUOTA_US):
            raise OSError(errno.EINVAL, "Invalid argument", str(self))
        self.keep(text)

    def _hand_on(self, text: str) -> None:
        group = type(self)(self.parent)
        is_root = not (Path(group.parent) / "cgroup.procs").exists()
        if group.processes() and not is_root:
            raise OSError(errno.EBUSY, "Device or resource busy", str(self))
        self.keep(text.removeprefix("+"))
        for child in Path(group).iterdir():
            if child.is_dir():
                (child / "cpu.max").write_text("max 100000\n")
