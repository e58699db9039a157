"""Compiles the virtual device once for each version of its sources and of torch, and loads it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.ending import run_to_end

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAME = "evenstride_virtual_device"
_SOURCES = ("device.cpp", "group.cpp", "autocast.cpp")
BUILD_LIMIT_S = 600
# The extra `dev` installs `ninja` next to Python, in a folder that may not be in PATH.
_PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


def missing() -> str:
    """Return what the build needs and this machine lacks; empty if it has everything."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        return "the virtual device needs torch 2.9 or newer to be built"
    lacks = [name for name in ("c++", "ninja") if shutil.which(name, path=_PATH) is None]
    return f"the virtual device needs {' and '.join(lacks)} to be built" if lacks else ""


@cache
def load() -> Any:
    """Return the extension module; builds it first if needed, in about a minute."""
    spec = importlib.util.spec_from_file_location(NAME, built())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built() -> Path:
    """Return the path of the compiled extension, which this function builds if it is missing."""
    library = ROOT / "build" / "virtual_device" / _key() / f"{NAME}.so"
    library.parent.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, however that ends
        if not library.exists():
            _build_into(library.parent)
    return library


def _build_into(final: Path) -> None:
    """Build in a temporary folder, so that a build that is cut off leaves nothing behind."""
    with tempfile.TemporaryDirectory(dir=final.parent) as folder:
        target = Path(folder) / final.name
        target.mkdir()
        # In a process of its own, because the build loads the extension.
        build = [sys.executable, "-m", __spec__.name, str(target)]
        jobs = os.environ.get("MAX_JOBS", "1")
        code, output = run_to_end(build, BUILD_LIMIT_S, {"MAX_JOBS": jobs, "PATH": _PATH}, cwd=ROOT)
        if code:
            raise RuntimeError(f"the virtual device could not be built:\n{output}")
        target.rename(final)


def _key() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for path in sorted((*HERE.glob("*.cpp"), *HERE.glob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _build(folder: str) -> None:
    from torch.utils import cpp_extension

    cpp_extension.load(
        NAME,
        [str(HERE / name) for name in _SOURCES],
        extra_cflags=["-O1", "-g0"],
        build_directory=folder,
        verbose=True,
    )


if __name__ == "__main__":
    _build(sys.argv[1])
