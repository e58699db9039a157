"""Limits pytest's collection of doctests in the package to modules that have some."""

from importlib.util import find_spec
from pathlib import Path

# Without torchft, an optional extra, pytest cannot import the doctests of that integration.
collect_ignore = [] if find_spec("torchft") else ["src/evenstride/integrations/torchft"]
# pytest must know the plugin's option before it collects tests.
pytest_plugins = ["tests.messages"]
SOURCE = Path(__file__).parent / "src"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip modules without doctests: importing all of them takes longer than most tests."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(SOURCE):
        return None
    return True if ">>>" not in collection_path.read_text() else None
