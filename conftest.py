"""Limits pytest's collection of doctests to modules that have some."""

from importlib.util import find_spec
from pathlib import Path

# Pytest cannot import the doctests of integrations whose library, an optional extra, is missing.
_NEED = {
    "accelerate": [
        "src/evenstride/integrations/accelerate.py",
        "src/evenstride/integrations/accelerate_parts",
        "tests/integrations/accelerate_programs.py",
    ],
    "ray": [
        "src/evenstride/integrations/ray.py",
        "tests/integrations/ray_cluster.py",
        "tests/integrations/ray_local.py",
    ],
    "torchft": ["src/evenstride/integrations/torchft"],
    "lightning": [
        "src/evenstride/integrations/lightning.py",
        "src/evenstride/integrations/lightning_parts",
        "tests/integrations/fabric_programs.py",
        "tests/integrations/lightning_programs.py",
        "tests/integrations/lightning_refusals.py",
    ],
}
collect_ignore = [path for name, paths in _NEED.items() if not find_spec(name) for path in paths]
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
