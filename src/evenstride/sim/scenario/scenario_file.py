"""Read a scenario file, and say exactly what is wrong with one and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from evenstride.errors import ScenarioError
from evenstride.sim.scenario import fields
from evenstride.sim.scenario.fields import Place
from evenstride.sim.scenario.scenario_model import MAY_BE_CUT, LoadReplay, Scenario, chosen
from evenstride.sim.scenario.timeline import load_recording
from evenstride.sim.scenario.yaml_reader import Parsed, read_yaml

MOST = 10
"""Complaints that are told at once."""

_KINDS = {"integer": "a whole number", "number": "a number"}
_THOUSANDS = re.compile(r"[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?")
_NO_THOUSANDS = "; a number has no thousands separator"


def complaints(error: ValidationError, parsed: Parsed) -> Iterator[str]:
    """Yield a line for each thing that is wrong, at most `MOST` of them."""
    problems = error.errors(include_url=False)
    for problem in problems[:MOST]:
        place, said = _complaint(problem)
        yield parsed.said(place, said)
    if len(problems) > MOST:
        yield f"{parsed.source}: and {len(problems) - MOST} more"


def _complaint(problem: ErrorDetails) -> tuple[Place, str]:
    spot = _Spot.at(problem["loc"])
    context, value = problem.get("ctx", {}), problem["input"]
    match problem["type"]:
        case fields.REFUSED:
            return (*spot.place, *context["place"]), context["problem"]
        case "missing":
            about = spot.node.get("description")
            allowed = f"allowed: {_allowed(spot.node)}"
            return spot.place, f"it is missing ({f'{about}; ' if about else ''}{allowed})"
        case "extra_forbidden" | "invalid_key":
            meant = _nearest(spot.place[-1], spot.parent.get("properties", ()))
            return spot.place, f"there is no such field{meant} (allowed: {_allowed(spot.parent)})"
        case "union_tag_invalid" | "union_tag_not_found":
            kinds, given = spot.node["discriminator"]["mapping"], "it is missing"
            if "tag" in context:
                given = fields.shown(context["tag"]) + _nearest(context["tag"], kinds)
            return (*spot.place, "kind"), f"{given} (allowed: {', '.join(kinds)})"
    return spot.place, f"{_shown(value)} (allowed: {_allowed(spot.node)}{_hint(value, spot.node)})"


@dataclass(frozen=True, slots=True)
class _Spot:
    """A field, in the file and in the schema.

    Args:
        place: where it is in the file.
        node: what the schema says of it; empty if it says nothing.
        parent: the same of the part that it belongs to.
    """

    place: Place
    node: dict[str, Any]
    parent: dict[str, Any]

    @classmethod
    def at(cls, location: tuple[int | str, ...]) -> _Spot:
        """Return the spot of pydantic's location, in which the tags of unions stand too."""
        place: Place = ()
        node = parent = _schema()
        for part in location:
            if "discriminator" in node:
                node = _resolved({"$ref": node["discriminator"]["mapping"][part]})
                continue
            parent = node
            inner = node.get("items", {}) if isinstance(part, int) else node.get("properties", {})
            node = _resolved(inner if isinstance(part, int) else inner.get(part, {}))
            place = (*place, part)
        return cls(place, node, parent)


@cache
def _schema() -> dict[str, Any]:
    return Scenario.model_json_schema()


def _resolved(node: dict[str, Any]) -> dict[str, Any]:
    """Follow a reference, and leave out that a field may be null."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        target: dict[str, Any] = _schema()["$defs"][name]
        return target
    options = [option for option in node.get("anyOf", []) if option.get("type") != "null"]
    return {**node, **_resolved(options[0])} if len(options) == 1 else node


def _allowed(node: dict[str, Any]) -> str:
    """Say what the schema allows."""
    if "discriminator" in node:
        return "fields, of which kind is one of " + ", ".join(node["discriminator"]["mapping"])
    match node.get("type"):
        case "integer" | "number" as kind:
            return f"{_KINDS[kind]} {_range(node)}"
        case "string" if "enum" in node:
            return ", ".join(node["enum"])
        case "string":
            return (
                f"a text of 1 to {node['maxLength']} characters"
                if "maxLength" in node
                else "a text"
            )
        case "array":
            return "a list of at least 1" if "minItems" in node else "a list"
        case "object":
            return "the fields " + ", ".join(node["properties"])
    return "see evenstride simulate --schema"


def _range(node: dict[str, Any]) -> str:
    if "exclusiveMinimum" in node:
        return f"above {node['exclusiveMinimum']:g} and at most {node['maximum']:g}"
    if "maximum" in node:
        return f"from {node['minimum']:g} to {node['maximum']:g}"
    return f"of at least {node['minimum']:g}"


def _nearest(given: int | str, known: Iterable[str]) -> str:
    """Ask whether the most similar name was meant; nothing if none is similar."""
    found = get_close_matches(str(given).lower(), known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _hint(value: Any, node: dict[str, Any]) -> str:
    number = node.get("type") in _KINDS and isinstance(value, str)
    return _NO_THOUSANDS if number and _THOUSANDS.fullmatch(value) else ""


def _shown(value: Any) -> str:
    return "it is empty" if value is None else fields.shown(value)


@dataclass(frozen=True, slots=True)
class ScenarioFile:
    """What a scenario file holds, before it is known what counts instead of some of it.

    Args:
        scenario: its scenario, of which events may lie after the last step.
        parsed: its values and their lines.
    """

    scenario: Scenario
    parsed: Parsed

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what a file holds.

        Raises:
            ScenarioError: names file, line, field and what is allowed there.
        """
        parsed = read_yaml(path)
        return cls(_validated(parsed, MAY_BE_CUT), parsed)

    def check_steps(self) -> None:
        """Raise unless every event begins within the file's own steps.

        Raises:
            ScenarioError: one does not.
        """
        _validated(self.parsed)

    def lacking(self) -> str:
        """Return which recording cannot be replayed, and why; nothing if all are there.

        Raises:
            ScenarioError: a recording that is there has not the machines that are asked for.
        """
        for number, event in enumerate(self.scenario.events):
            if not isinstance(event, LoadReplay):
                continue
            try:
                machines = len(load_recording(event.day))
            except ScenarioError as error:
                problem = f"replay cannot be simulated: {error}"
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
                "many workers; or name the machines, some of them more than once)"
            )
            raise ScenarioError(self.parsed.said(("events", number, "workers"), problem))


def load_scenario(path: Path, changes: dict[str, Any] | None = None) -> Scenario:
    """Return the scenario of a YAML file.

    Args:
        path: of the file.
        changes: values to use instead of the file's; a key such as ``exchange.lag`` goes into
            the part of that name. Events that new ``steps`` leave no room for do not happen;
            whatever happens before them stays as it is.

    Raises:
        ScenarioError: names file, line, field and what is allowed there.
    """
    file, changes = ScenarioFile.read(path), changes or {}
    if "steps" not in changes:
        file.check_steps()
    if lacking := file.lacking():
        raise ScenarioError(lacking)
    return changed(file.scenario, changes) if changes else file.scenario


def changed(scenario: Scenario, changes: dict[str, Any]) -> Scenario:
    """Return a scenario with other values; see `load_scenario`.

    Raises:
        ScenarioError: a value is out of range.
    """
    plain = scenario.model_dump()
    for key, value in changes.items():
        _put(plain, key.split("."), value)
    return _validated(Parsed(scenario.name, plain, {}), MAY_BE_CUT)


def _validated(parsed: Parsed, context: dict[str, bool] | None = None) -> Scenario:
    try:
        return Scenario.model_validate(parsed.plain, context=context)
    except ValidationError as error:
        raise ScenarioError("\n".join(complaints(error, parsed))) from None


def _put(plain: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        plain = plain[key]
    plain[keys[-1]] = value
