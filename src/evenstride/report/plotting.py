"""Shared by all matplotlib plots: reproducible SVG, and writing to a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def repeatable() -> Iterator[None]:
    """Make matplotlib write byte-identical SVG for the same figure."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "evenstride"}):
        yield


def save(figure: Figure, path: Path, dpi: int) -> None:
    """Write a figure and create its folder."""
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi, metadata=metadata)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror})") from None


def literal(text: str) -> str:
    """Return a text with escaped dollar signs, which would start a formula in matplotlib."""
    return text.replace("$", r"\$")
