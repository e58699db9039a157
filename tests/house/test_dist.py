"""The check of wheel and sdist finds missing and superfluous files."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

from tools.check_dist import SDIST_HOLDS, main, sdist_problems, wheel_problems


def wheel(folder: Path, *names: str) -> Path:
    path = folder / "evenstride-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


LICENCE = "evenstride-1.0.dist-info/licenses/LICENSE"


def test_a_whole_wheel_has_no_problem(tmp_path: Path) -> None:
    assert wheel_problems(wheel(tmp_path, "evenstride/a.py", LICENCE), {"evenstride/a.py"}) == []


def test_a_wheel_that_lacks_a_file_or_has_another_is_refused(tmp_path: Path) -> None:
    built = wheel(tmp_path, "evenstride/a.py", "tests/test_a.py")

    assert wheel_problems(built, {"evenstride/a.py", "evenstride/cluster.yaml"}) == [
        f"{built.name} lacks evenstride/cluster.yaml",
        f"{built.name} has tests/test_a.py",
        f"{built.name} lacks the licence",
    ]


def test_an_sdist_must_hold_the_tests(tmp_path: Path) -> None:
    path = tmp_path / "evenstride-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in SDIST_HOLDS:
            if name != "tests":
                archive.addfile(tarfile.TarInfo(f"evenstride-1.0/{name}"))

    assert sdist_problems(path) == [f"{path.name} lacks tests"]


def test_a_folder_without_them_is_refused(tmp_path: Path) -> None:
    assert main(tmp_path) == 1
