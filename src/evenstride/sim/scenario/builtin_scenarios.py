"""The scenarios that the package ships, by name."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from evenstride.errors import ScenarioError
from evenstride.sim.scenario.scenario_file import read_yaml

SCENARIOS = Path(__file__).parents[1] / "scenarios"
"""Folder of the built-in scenarios. Each file has the name of its scenario."""
_LIST = "evenstride simulate --list prints all names"


def scenario_names() -> tuple[str, ...]:
    """Return the names of the built-in scenarios in alphabetical order."""
    return tuple(sorted(path.stem for path in SCENARIOS.glob("*.yaml")))


def summaries() -> dict[str, str]:
    """Return the first sentence of each built-in scenario's description, by name."""
    plain = {name: read_yaml(SCENARIOS / f"{name}.yaml").plain for name in scenario_names()}
    return {name: values["about"].partition(". ")[0] for name, values in plain.items()}


def scenario_path(text: str) -> Path:
    """Return the file or folder at a path, or the file of the built-in scenario of that name.

    A file or folder takes precedence over a built-in scenario of the same name.

    Raises:
        ScenarioError: The text is neither the name of a built-in scenario nor a path that exists.
    """
    path, names = Path(text), scenario_names()
    if path.exists():
        return path
    if text in names:
        return SCENARIOS / f"{text}.yaml"
    near = get_close_matches(path.stem, names)
    similar = f"similar names are {', '.join(near)}; " if near else ""
    raise ScenarioError(
        f"no scenario {text!r}: expected a scenario file, a folder of them, or the name of a "
        f"built-in scenario; {similar}{_LIST}"
    )
