"""Read YAML with the line of every value, without the surprises of YAML 1.1 and without bombs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml

from evenstride.errors import ScenarioError
from evenstride.sim.scenario.fields import Place, said, shown

DEEPEST = 10
"""Lists and fields that may be within each other; in a scenario there are four at most."""

MOST_REPEATED = 100_000
"""Values that ``*`` and ``<<`` may repeat; a few lines could stand for billions."""

_LONGEST_NAME = 200
_STANDARD = "tag:yaml.org,2002:"

Field = tuple[yaml.Node, yaml.Node]


class Loader(yaml.SafeLoader):  # type: ignore[misc]  # the stubs of yaml are not required
    """Composes a file, and refuses what no scenario may have.

    Numbers are as in YAML 1.2: ``1e-3`` is one, ``1:30`` and ``yes`` are not. No field of a
    scenario is true or false, so these words are texts, and not 1 or 0. What a value is can be
    told from how it is written; a tag such as ``!!int`` could only contradict that.

    Args:
        text: what the file holds.
        source: its path, or what else is shown for it.

    Raises:
        ScenarioError: a character of the text is none that YAML may have.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self._place: Place = ()
        self._whole: dict[int, yaml.Node] = {}  # by id; mappings that have all their fields
        self._merged = 0
        try:
            super().__init__(text)
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            character = f"the character U+{error.character:04X} is in it"
            self.refuse(line, (), f"{character} (allowed: characters that can be seen)")

    def compose(self) -> yaml.Node | None:
        """Return the node of all that the file holds; none if it is empty.

        Raises:
            ScenarioError: it is no YAML, or not that of a scenario.
        """
        try:
            node: yaml.Node | None = self.get_single_node()
        except ScenarioError:  # it is a ValueError too
            raise
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            line = self.line if mark is None else mark.line
            self.refuse(line + 1, (), _in_plain_words(error))
        except (ValueError, OverflowError) as error:  # of the number of a character or a version
            problem = re.split("[\n;]", str(error))[0]
            self.refuse(self.line + 1, (), f"it is not YAML that can be read ({problem})")
        return node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Return the next node; the index is its number, or the key that it belongs to."""
        event, above = self.peek_event(), self._place
        line = event.start_mark.line + 1
        if isinstance(index, yaml.Node):
            self._check_name(index)
            self._place = (*above, index.value)
        elif index is not None:
            self._place = (*above, index)
        elif parent is not None and not isinstance(event, yaml.ScalarEvent | yaml.AliasEvent):
            self._refuse_name(line, "what stands before the colon")
        self.check_depth(line, self._place)
        if getattr(event, "tag", None) is not None:
            tag = shown(event.tag.replace(_STANDARD, "!!"))
            self.refuse(line, self._place, f"it has the tag {tag} (allowed: a value without a tag)")
        node: yaml.Node = super().compose_node(parent, index)
        self._place = above
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Return the next mapping with all its fields, also those that are merged into it."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        own: dict[str, Field] = {}
        merged: dict[str, Field] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in own:
                self.refuse(line, self._place, f"{key.value} is given twice (allowed: once)")
            own[key.value] = key, value
            if key.tag == f"{_STANDARD}merge":
                for field in self._merging(value, line):
                    merged.setdefault(field[0].value, field)
        own = {name: field for name, field in own.items() if not field[0].tag.endswith(":merge")}
        node.value = list({**merged, **own}.values())
        self._whole[id(node)] = node
        return node

    def _merging(self, value: yaml.Node, line: int) -> list[Field]:
        """Return the fields that ``<<`` merges; of two of one name the first one counts."""
        fields: list[Field] = []
        for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if id(source) not in self._whole:
                problem = "<< merges what has no fields (allowed: fields that end before it)"
                self.refuse(line, self._place, problem)
            fields += source.value
            self._merged += len(source.value)
            self.check_repeated(self._merged, line, self._place)
        return fields

    def _check_name(self, key: yaml.Node) -> None:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            self._refuse_name(line, "what stands before the colon")
        if not (key.value.isprintable() and len(key.value) <= _LONGEST_NAME):
            self._refuse_name(line, shown(key.value))
        if not key.tag.endswith((":str", ":merge")):
            self._refuse_name(line, key.value)

    def _refuse_name(self, line: int, name: str) -> NoReturn:
        # In braces a comma ends the value, so what follows is taken for the next name.
        hint = "; a number has no thousands separator" if _THOUSANDS.fullmatch(name) else ""
        problem = f"{name} is no name of a field (allowed: a short text{hint})"
        self.refuse(line, self._place, problem)

    def check_depth(self, line: int, place: Place) -> None:
        """Raise if a value is in too many others, which it is if one contains itself."""
        if len(place) > DEEPEST:
            problem = f"it is nested too deep (allowed: lists and fields up to {DEEPEST} deep)"
            self.refuse(line, place[:1], problem)

    def check_repeated(self, count: int, line: int, place: Place) -> None:
        """Raise if these are too many values to be repeated."""
        if count > MOST_REPEATED:
            problem = f"* and << repeat too many values (allowed: {MOST_REPEATED} in a file)"
            self.refuse(line, place, problem)

    def refuse(self, line: int, place: Place, problem: str) -> NoReturn:
        """Raise what is said about a field of this file."""
        raise ScenarioError(said(self.source, line, place, problem))


def _in_plain_words(error: yaml.MarkedYAMLError) -> str:
    """Return what is wrong with the YAML, and what to look at where it is often that."""
    problem, begun = error.problem or "it is not YAML", error.context_mark
    if "'\\t'" in problem:
        return f"{problem}: indent with spaces, not tabs"
    if "<block end>" in problem and begun is not None:
        return f"{problem}: check the indentation against line {begun.line + 1}"
    if problem.startswith("mapping values are not allowed"):
        return f"{problem}: check the indentation, and put a text that has a colon in quotes"
    if "another document" in problem:
        return f"{problem}: a file holds one scenario"
    return str(problem)


_THOUSANDS = re.compile(r"[0-9]{3}(\.[0-9]*)?")
_NUMBERS = "-+.0123456789"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list(_NUMBERS)),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list(_NUMBERS)),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list(_NUMBERS)),
    ("merge", r"<<", ["<"]),
):
    Loader.add_implicit_resolver(f"{_STANDARD}{_tag}", re.compile(f"(?:{_pattern})$"), _first)


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
