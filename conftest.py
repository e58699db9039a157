"""Limits pytest's collection of doctests to modules that have some."""

from importlib.util import find_spec
from pathlib import Path

# Without torchft, an optional extra, pytest cannot import the doctests of that integration.
collect_ignore = [] if find_spec("torchft") else ["src/evenstride/integrations/torchft"]
# pytest must know the plugin's option before it collects tests.
pytest_plugins = ["tests.messages"]
ROOT = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip modules without doctests: importing all of them takes longer than most tests."""
    # Helper modules of tests may need packages that are not installed.
    of_tests = collection_path.is_relative_to(ROOT / "tests")
    helps = of_tests and not collection_path.name.startswith(("test_", "conftest", "__init__"))
    if collection_path.suffix != ".py" or not (
        helps or collection_path.is_relative_to(ROOT / "src")
    ):
        return None
    return True if ">>>" not in collection_path.read_text() else None
