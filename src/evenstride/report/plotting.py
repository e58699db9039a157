"""What all plots by matplotlib share: the same bytes for the same figure, and how it is written."""

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
    """Let matplotlib give the same SVG for the same figure, byte for byte."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "evenstride"}):
        yield


def save(figure: Figure, path: Path, dpi: int) -> None:
    """Write a figure, and make its folder."""
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi, metadata=metadata)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror})") from None


def literal(text: str) -> str:
    """Return a text that matplotlib shows as it is: a pair of dollars would begin a formula."""
    return text.replace("$", r"\$")
