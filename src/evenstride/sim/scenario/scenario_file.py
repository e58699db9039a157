"""Read a scenario file, and report each error with its place and the valid values.

YAML is read with the line of every value, without the surprises of YAML 1.1 and without bombs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from evenstride.errors import ScenarioError
from evenstride.sim.scenario import scenario_events
from evenstride.sim.scenario.recordings import load_recording
from evenstride.sim.scenario.scenario_events import (
    LoadReplay,
    Place,
    chosen,
    shown,
)
from evenstride.sim.scenario.scenario_model import MAY_BE_CUT, Scenario

DEEPEST = 10
"""Largest depth of nested lists and fields; a scenario has at most four."""

MOST_REPEATED = 100_000
"""Largest number of values that ``*`` and ``<<`` may repeat; a few lines could mean billions."""

_TOO_DEEP = f"it is nested too deeply (allowed: lists and fields up to {DEEPEST} deep)"

_EXACT = 2**53  # below it, every integer has its own float

_TAG = "tag:yaml.org,2002:"
_LONGEST_NAME = 200
_TEXT = f"{_TAG}str"
_MERGE = f"{_TAG}merge"
_WRITTEN = "written "


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # the stubs of yaml are not required
    """Numbers are as in YAML 1.2: ``1e-3`` is a number, ``1:30`` and ``yes`` are not.

    No field of a scenario is true or false, so these words are texts, and not 1 or 0.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Return the next node; marks explicit tags to distinguish them from resolved ones."""
        written = getattr(self.peek_event(), "tag", None)
        node: yaml.Node = super().compose_node(parent, index)
        if written is not None:
            node.tag = f"{_WRITTEN}{written}"
        return node


_NUMBERS = "-+.0123456789"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list(_NUMBERS)),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list(_NUMBERS)),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list(_NUMBERS)),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(f"(?:{_pattern})$"), _first)


def said(source: str, line: int | None, place: Place, problem: str) -> str:
    """Return an error message about a field: file, line if known, field, problem."""
    field = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
    where = source if line is None else f"{source}:{line}"
    return f"{where}: {field + ': ' if field else ''}{problem}"


@dataclass(frozen=True, slots=True)
class Parsed:
    """The content of a file."""

    source: str  # its path, or another name for display
    plain: dict[str, Any]  # its values
    lines: dict[Place, int]  # their lines; empty if they come from no file

    def said(self, place: Place, problem: str) -> str:
        known = [self.lines[place[:n]] for n in range(len(place) + 1) if place[:n] in self.lines]
        return said(self.source, known[-1] if known else None, place, problem)


def read_yaml(path: Path) -> Parsed:
    """Return the names and values of a YAML file, or raise a `ScenarioError`."""
    try:
        text = path.read_text(encoding="utf-8")
        loader = _Loader(text)
        node = loader.get_single_node()
    except OSError as error:
        raise ScenarioError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ScenarioError(f"cannot read {path}: it is not UTF-8 text") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"it contains the character U+{error.character:04X} (allowed: printable ones)"
        raise ScenarioError(said(str(path), line, (), problem)) from None
    except yaml.MarkedYAMLError as error:
        problem = _in_plain_words(error)
        raise ScenarioError(said(str(path), error.problem_mark.line + 1, (), problem)) from None
    except RecursionError:
        raise ScenarioError(said(str(path), loader.line + 1, (), _TOO_DEEP)) from None
    except (ValueError, OverflowError):
        problem = "an escape sequence is invalid"
        raise ScenarioError(said(str(path), loader.line + 1, (), problem)) from None
    if not isinstance(node, yaml.MappingNode):
        problem = "a scenario consists of names and values (name, global_batch, workers, ...)"
        raise ScenarioError(
            said(str(path), 1, (), f"the file is empty; {problem}" if node is None else problem)
        )
    values = _Values(loader, str(path))
    return Parsed(str(path), values.of(node, (), 1), values.lines)


def _in_plain_words(error: yaml.MarkedYAMLError) -> str:
    """Return the YAML error, with a hint at its usual cause."""
    problem = str(error.problem)
    if "'\\t'" in problem:
        return f"{problem}: indent with spaces, not tabs"
    if "<block end>" in problem and error.context_mark is not None:
        return f"{problem}: check the indentation against line {error.context_mark.line + 1}"
    if problem.startswith("mapping values are not allowed"):
        return f"{problem}: check the indentation, and put a text that has a colon in quotes"
    if "another document" in problem:
        return f"{problem}: a file holds one scenario"
    return problem


class _Values:
    """Turns nodes into values, and records the line of each.

    A value repeated by an alias is read again at each place, so that every place has its line.
    """

    def __init__(self, loader: _Loader, source: str) -> None:
        self._loader = loader
        self._source = source
        self._seen: set[int] = set()
        self._repeated = 0
        self.lines: dict[Place, int] = {}

    def of(self, node: yaml.Node, place: Place, line: int) -> Any:
        self.lines[place] = line
        self._check_size(node, place)
        # The type of a value follows from its notation; a tag could only contradict that.
        if node.tag.startswith(_WRITTEN):
            tag = node.tag.removeprefix(_WRITTEN).replace(_TAG, "!!")
            self._refuse(
                node, place, f"it has the tag {shown(tag)} (allowed: a value without a tag)"
            )
        if isinstance(node, yaml.MappingNode):
            return {
                name: self.of(value, (*place, name), _line(key))
                for name, (key, value) in self._fields(node, place).items()
            }
        if isinstance(node, yaml.SequenceNode):
            return [self.of(v, (*place, n), _line(v)) for n, v in enumerate(node.value)]
        return self._scalar(node)

    def _fields(
        self, node: yaml.MappingNode, place: Place, depth: int = 0
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Return key and value of each field, also of those that ``<<`` merges."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            self._check_name(key, place)
            name = key.value
            if name in own:
                self._refuse(key, place, f"{shown(name)} is given twice (allowed: once)")
            own[name] = key, value
            if key.tag != _MERGE:
                continue
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(source, yaml.MappingNode) or depth == DEEPEST:
                    self._refuse(key, place, "<< merges a value without fields, or too deeply")
                self._check_size(source, place)
                # The first of two merged sources takes precedence.
                merged = {**self._fields(source, place, depth + 1), **merged}
        return {**merged, **{n: field for n, field in own.items() if field[0].tag != _MERGE}}

    def _check_name(self, key: yaml.Node, place: Place) -> None:
        if not isinstance(key, yaml.ScalarNode):
            self._refuse(key, place, "the text before a colon is a list, not the name of a field")
        short = key.value.isprintable() and len(key.value) <= _LONGEST_NAME
        if not short or key.tag not in {_TEXT, _MERGE}:
            # In braces a comma ends the value, so the text after it becomes the next name.
            allowed = "allowed: a short text; numbers have no thousands separators"
            self._refuse(key, place, f"{shown(key.value)} is not a field name ({allowed})")

    def _check_size(self, node: yaml.Node, place: Place) -> None:
        if len(place) > DEEPEST:
            self._refuse(node, place[:1], _TOO_DEEP)
        # A merge repeats all fields of its source at once.
        size = len(node.value) if isinstance(node, yaml.MappingNode) else 1
        self._repeated += size if id(node) in self._seen else 0
        self._seen.add(id(node))
        if self._repeated > MOST_REPEATED:
            problem = f"* and << repeat too many values (allowed: {MOST_REPEATED} in a file)"
            self._refuse(node, place[:1], problem)

    def _refuse(self, node: yaml.Node, place: Place, problem: str) -> NoReturn:
        raise ScenarioError(said(self._source, _line(node), place, problem))

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            value = self._loader.construct_object(node)
        except ValueError:  # too many digits for Python: treated as infinite
            return float(node.value.replace("_", ""))
        # 1e3 is as valid an integer as 1000.
        whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
        return int(value) if whole else value


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1


MOST = 10
"""Largest number of errors to report at once."""


def _complaints(error: ValidationError, parsed: Parsed) -> Iterator[str]:
    problems = error.errors(include_url=False)
    for problem in problems[:MOST]:
        place = problem["loc"]
        if place[:1] == ("events",):
            place = (*place[:2], *place[3:])  # without the kind of the event
        place += problem.get("ctx", {}).get("place", ())
        yield parsed.said(place, _complaint(problem))
    if len(problems) > MOST:
        yield f"{parsed.source}: and {len(problems) - MOST} more"


def _complaint(problem: ErrorDetails) -> str:
    match problem["type"]:
        case scenario_events.REFUSED | "missing":
            return problem["msg"]
        case "extra_forbidden":
            given = str(problem["loc"][-1]).lower()
            meant = get_close_matches(given, _field_names(), n=1)
            return "unknown field" + (f"; did you mean {meant[0]}?" if meant else "")
        case "union_tag_invalid":  # pydantic's message would contain the whole value
            context = problem["ctx"]
            return f"unknown kind {shown(context['tag'])} (allowed: {context['expected_tags']})"
    value = "empty" if problem["input"] is None else shown(problem["input"])
    return f"{value} ({problem['msg']})"


@cache
def _field_names() -> list[str]:
    schema = Scenario.model_json_schema()
    parts = [schema, *schema["$defs"].values()]
    return sorted({name for part in parts for name in part["properties"]})


@dataclass(frozen=True, slots=True)
class ScenarioFile:
    """The content of a scenario file, before overrides replace some of it."""

    scenario: Scenario
    parsed: Parsed

    @classmethod
    def read(cls, path: Path) -> Self:
        parsed = read_yaml(path)
        return cls(_validated(parsed, MAY_BE_CUT), parsed)

    def check_steps(self) -> None:
        _validated(self.parsed)

    def lacking(self) -> str:
        """Return which recording cannot be replayed, and why; empty if all are available."""
        for number, event in enumerate(self.scenario.events):
            if not isinstance(event, LoadReplay):
                continue
            try:
                machines = len(load_recording(event.day))
            except ScenarioError as error:
                problem = f"cannot simulate the replay: {error}"
                return self.parsed.said(("events", number, "kind"), problem)
            self._check_machines(event, number, machines)
        return ""

    def _check_machines(self, event: LoadReplay, number: int, machines: int) -> None:
        workers, rows = len(chosen(event.workers, self.scenario.size)), event.machines or []
        if max(rows, default=0) >= machines:
            problem = f"{max(rows)} (allowed: a machine from 0 to {machines - 1})"
            raise ScenarioError(self.parsed.said(("events", number, "machines"), problem))
        if not rows and workers > machines:
            problem = (
                f"{workers} workers, but {machines} machines were recorded (allowed: at most as "
                "many workers; or list the machines, some of them more than once)"
            )
            raise ScenarioError(self.parsed.said(("events", number, "workers"), problem))


def load_scenario(path: Path, changes: dict[str, Any] | None = None) -> Scenario:
    """Return the scenario of a YAML file, with ``changes`` instead of the file's own values.

    A key such as ``exchange.lag`` changes a field of that part. Events after the end of shorter
    ``steps`` do not occur; earlier events stay unchanged.

    Raises:
        ScenarioError: names file, line, field and the valid values.
    """
    file, changes = ScenarioFile.read(path), changes or {}
    if "steps" not in changes:
        file.check_steps()
    if lacking := file.lacking():
        raise ScenarioError(lacking)
    return changed(file.scenario, changes) if changes else file.scenario


def changed(scenario: Scenario, changes: dict[str, Any]) -> Scenario:
    """Return a scenario with other values; see `load_scenario`."""
    plain = scenario.model_dump()
    for key, value in changes.items():
        _put(plain, key.split("."), value)
    return _validated(Parsed(scenario.name, plain, {}), MAY_BE_CUT)


def _validated(parsed: Parsed, context: dict[str, bool] | None = None) -> Scenario:
    try:
        return Scenario.model_validate(parsed.plain, context=context)
    except ValidationError as error:
        raise ScenarioError("\n".join(_complaints(error, parsed))) from None


def _put(plain: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        plain = plain[key]
    plain[keys[-1]] = value
