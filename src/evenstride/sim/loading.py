"""Read a scenario file, and say exactly what is wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from evenstride.errors import ScenarioError
from evenstride.sim.scenario import Scenario

Place = tuple[int | str, ...]


def load_scenario(path: Path, changes: dict[str, Any] | None = None) -> Scenario:
    """Return the scenario of a YAML file.

    Args:
        path: of the file.
        changes: values to use instead of the file's; a key such as ``exchange.lag`` goes into
            the part of that name.

    Raises:
        ScenarioError: names file, line, field and what is allowed there.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path} cannot be read: {error}") from None
    plain, lines = _parsed(path, text)
    for key, value in (changes or {}).items():
        _put(plain, key.split("."), value)
    try:
        return Scenario.model_validate(plain)
    except ValidationError as error:
        raise ScenarioError("\n".join(_complaints(path, error, lines))) from None


def _parsed(path: Path, text: str) -> tuple[dict[str, Any], dict[Place, int]]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        plain = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it is not YAML"
        raise ScenarioError(f"{path}{line}: {problem}") from None
    if not isinstance(plain, dict):
        raise ScenarioError(
            f"{path}:1: a scenario is a list of names and values (name, global_batch, workers, ...)"
        )
    lines: dict[Place, int] = {}
    _note_lines(node, (), lines)
    return plain, lines


def _note_lines(node: Any, place: Place, lines: dict[Place, int]) -> None:
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            lines[(*place, key.value)] = key.start_mark.line + 1
            _note_lines(value, (*place, key.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _note_lines(value, (*place, index), lines)


def _put(plain: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = plain.setdefault(key, {})
        if not isinstance(inner, dict):
            return  # the file is wrong there, which is said in a moment
        plain = inner
    plain[keys[-1]] = value


def _complaints(path: Path, error: ValidationError, lines: dict[Place, int]) -> list[str]:
    found = []
    for problem in error.errors(include_url=False):
        place = _without_tags(tuple(problem["loc"]), lines)
        line = next(lines[place[:n]] for n in range(len(place), -1, -1) if place[:n] in lines)
        field = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
        given = problem["input"]
        shown = "" if problem["type"] in _NOT_SHOWN else f" (it is {given!r})"
        message = problem["msg"].removeprefix("Value error, ")
        found.append(f"{path}:{line}: {field + ': ' if field else ''}{message}{shown}")
    return found


_NOT_SHOWN = ("missing", "extra_forbidden", "value_error", "union_tag_not_found")


def _without_tags(place: Place, lines: dict[Place, int]) -> Place:
    """Leave out what pydantic puts into a place beyond the keys of the file: the tags of unions."""
    kept: Place = ()
    for index, part in enumerate(place):
        last = index == len(place) - 1
        if (*kept, part) in lines or (last and isinstance(part, str) and kept in lines):
            kept = (*kept, part)
    return kept
