"""What of the package can be collected here, and what there is to collect."""

from importlib.util import find_spec
from pathlib import Path

# Without torchft (an extra of its own) the doctests of that integration cannot be imported.
collect_ignore = [] if find_spec("torchft") else ["src/evenstride/integrations/torchft"]
# Its option has to be known before the tests are looked for.
pytest_plugins = ["tests.messages"]
SOURCE = Path(__file__).parent / "src"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Pass over modules without doctests: importing all of them takes longer than most tests."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(SOURCE):
        return None
    return True if ">>>" not in collection_path.read_text() else None
