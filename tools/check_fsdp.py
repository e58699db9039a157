"""Check FSDP2's source in releases of torch that are not installed.

evenstride times FSDP2 by its private methods and knows every place in which they wait. For each
wheel, or folder with an unpacked one, this prints the unknown places, or that every wait is known.
The exit code is 1 if a place is unknown. Usage:

    pip download torch==2.15.0 --no-deps --dest wheels
    python tools/check_fsdp.py wheels/*.whl
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

from evenstride.runtime.engines.fsdp_source import FOLDER, what_moved


def files(release: Path) -> dict[str, str]:
    """Return the text of each of FSDP2's files in a wheel or a folder like ``site-packages``."""
    if release.is_dir():
        paths = sorted((release / FOLDER).glob("*.py"))
        return {path.name: path.read_text("utf-8") for path in paths}
    with zipfile.ZipFile(release) as archive:
        names = [one for one in archive.namelist() if one.startswith(FOLDER) and one[-3:] == ".py"]
        return {Path(name).name: archive.read(name).decode() for name in names}


def main(releases: list[Path]) -> int:
    """Check each release; return the exit code."""
    unknown = {release: what_moved(files(release)) for release in releases}
    for release, moved in unknown.items():
        print(f"{release.name}: {'; '.join(moved) or 'every wait is known'}")
    return any(unknown.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="+", type=Path, help="wheels, or unpacked ones")
    sys.exit(main(parser.parse_args().releases))
