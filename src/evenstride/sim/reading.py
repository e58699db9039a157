"""Read YAML with the line of every value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from evenstride.errors import ScenarioError
from evenstride.sim.composing import Loader
from evenstride.sim.parts import Place, said

_EXACT = 2**53  # below it, every whole number has a float of its own


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
        return said(self.source, known[-1] if known else None, place, problem)


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
    loader = Loader(text, str(path))
    node, values = loader.compose(), _Values(loader)
    if not isinstance(node, yaml.MappingNode):
        empty = "the file is empty; " if node is None else ""
        fields = "names and values (name, global_batch, workers, ...)"
        problem = f"{empty}a scenario is a list of {fields}"
        loader.refuse(1, (), problem)
    return Parsed(str(path), values.of(node, (), 1), values.lines)


class _Values:
    """Turns nodes into values, and notes the line of each.

    What is repeated by an alias is read again wherever it is, so that every place has its line.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._seen: set[int] = set()
        self._repeated = 0
        self.lines: dict[Place, int] = {}

    def of(self, node: yaml.Node, place: Place, line: int) -> Any:
        """Return the value of a node."""
        self.lines[place] = line
        self._loader.check_depth(line, place)
        self._repeated += id(node) in self._seen
        self._loader.check_repeated(self._repeated, line, place[:1])
        self._seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            return {
                key.value: self.of(value, (*place, key.value), _line(key))
                for key, value in node.value
            }
        if isinstance(node, yaml.SequenceNode):
            return [self.of(v, (*place, n), _line(v)) for n, v in enumerate(node.value)]
        return self._scalar(node)

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            value = self._loader.construct_object(node)
        except ValueError:  # more digits than Python reads: as good as infinite
            return float(node.value.replace("_", ""))
        # 1e3 is as good a whole number as 1000.
        whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
        return int(value) if whole else value


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1
