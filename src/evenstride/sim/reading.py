"""Read YAML with the line of every value, and without the surprises of YAML 1.1."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml

from evenstride.errors import ScenarioError
from evenstride.sim.parts import Place


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a file holds.

    Args:
        source: its path, or what else is shown for it.
        plain: its values.
        lines: where they are; empty if they come from no file.
    """

    source: str
    plain: dict[str, Any]
    lines: dict[Place, int]

    def said(self, place: Place, problem: str) -> str:
        """Return a complaint about a field: file, line, field, problem."""
        known = [self.lines[place[:n]] for n in range(len(place) + 1) if place[:n] in self.lines]
        line = f":{known[-1]}" if known else ""
        field = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
        return f"{self.source}{line}: {field + ': ' if field else ''}{problem}"


def read_yaml(path: Path) -> Parsed:
    """Return the names and values of a YAML file.

    Raises:
        ScenarioError: it cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ScenarioError(f"{path} cannot be read: {problem}") from None
    try:
        node = yaml.compose(text, Loader=_Loader)
        lines = _Lines(path)
        if node is not None:
            lines.note(node, ())
        plain = yaml.load(text, Loader=_Loader)
    except ScenarioError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ScenarioError(f"{path}{line}: {error.problem or 'it is not YAML'}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = re.split("[\n;]", str(error))[0]
        raise ScenarioError(f"{path}: it is not YAML that can be read ({problem})") from None
    if not isinstance(plain, dict):
        raise ScenarioError(
            f"{path}:1: a scenario is a list of names and values (name, global_batch, workers, ...)"
        )
    return Parsed(str(path), plain, lines.known)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # the stubs of yaml are not required
    """Numbers are as in YAML 1.2: ``1e-3`` is one, ``1:30`` and ``yes`` are not.

    No field of a scenario is true or false, so these words are texts, and not 1 or 0.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}


_NUMBERS = "-+.0123456789"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list(_NUMBERS)),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list(_NUMBERS)),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list(_NUMBERS)),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first
    )


class _Lines:
    """Notes the line of every value of a composed file, and refuses what none may be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[int] = set()
        self.known: dict[Place, int] = {}

    def note(self, node: yaml.Node, place: Place) -> None:
        """Take note of a value and of all that is in it."""
        self.known.setdefault(place, node.start_mark.line + 1)
        if id(node) in self._seen:  # an alias, which may even lead to itself
            return
        self._seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                self._note_field(key, value, place)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self.note(value, (*place, index))

    def _note_field(self, key: yaml.Node, value: yaml.Node, place: Place) -> None:
        line = key.start_mark.line + 1
        if not key.tag.endswith((":str", ":merge")):
            name = key.value if isinstance(key, yaml.ScalarNode) else "what stands before the colon"
            self._refuse(line, f"{name} is no name of a field")
        if (*place, key.value) in self.known:
            self._refuse(line, f"{key.value} is given twice")
        self.known[(*place, key.value)] = line
        self.note(value, (*place, key.value))

    def _refuse(self, line: int, problem: str) -> NoReturn:
        raise ScenarioError(f"{self._path}:{line}: {problem}")
