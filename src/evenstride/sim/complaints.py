"""Say in plain words what pydantic finds wrong with a scenario, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from evenstride.sim import parts
from evenstride.sim.parts import Place
from evenstride.sim.reading import Parsed
from evenstride.sim.scenario import Scenario

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
        case parts.REFUSED:
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
                given = parts.shown(context["tag"]) + _nearest(context["tag"], kinds)
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
    return "it is empty" if value is None else parts.shown(value)
