"""Check the wheel and the sdist in a folder before they are released.

The wheel must hold every file of the package and nothing else; the sdist must hold what the wheel
was built from, the tests and the documentation. Usage: python tools/check_dist.py dist
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SDIST_HOLDS = ("src", "tests", "examples", "benchmarks", "docs", "README.md", "LICENSE", "Makefile")


def tracked(folder: str) -> set[str]:
    """Return the files of a folder under version control, relative to its parent."""
    command = ["git", "-C", str(ROOT), "ls-files", folder]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {Path(line).relative_to(Path(folder).parent).as_posix() for line in listed.splitlines()}


def wheel_problems(wheel: Path, expected: set[str]) -> list[str]:
    """Return what is missing from a wheel and what does not belong there."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    metadata = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    problems = [f"{wheel.name} lacks {name}" for name in sorted(expected - names)]
    problems += [f"{wheel.name} has {name}" for name in sorted(names - metadata - expected)]
    if not any(name.endswith("licenses/LICENSE") for name in metadata):
        problems.append(f"{wheel.name} lacks the licence")
    return problems


def sdist_problems(sdist: Path) -> list[str]:
    """Return what is missing from an sdist."""
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if name.count("/")}
    return [f"{sdist.name} lacks {name}" for name in SDIST_HOLDS if name not in tops]


def main(folder: Path) -> int:
    """Check one wheel and one sdist; return the exit code."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if (len(wheels), len(sdists)) != (1, 1):
        print(
            f"expected one wheel and one sdist in {folder}, found {len(wheels)} and {len(sdists)}"
        )
        return 1
    problems = wheel_problems(wheels[0], tracked("src/evenstride")) + sdist_problems(sdists[0])
    print(*problems or [f"{wheels[0].name} and {sdists[0].name} are complete"], sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
