"""Read a scenario file, and say exactly what is wrong with one and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from evenstride.errors import ScenarioError
from evenstride.sim.scenario import fields
from evenstride.sim.scenario.scenario_model import MAY_BE_CUT, LoadReplay, Scenario, chosen
from evenstride.sim.scenario.timeline import load_recording
from evenstride.sim.scenario.yaml_reader import Parsed, read_yaml

MOST = 10
"""Complaints that are told at once."""


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
        case fields.REFUSED | "missing":
            return problem["msg"]
        case "extra_forbidden":
            given = str(problem["loc"][-1]).lower()
            meant = get_close_matches(given, _field_names(), n=1)
            return "there is no such field" + (f"; did you mean {meant[0]}?" if meant else "")
        case "union_tag_invalid":  # pydantic's message would hold all of it, however large
            context = problem["ctx"]
            return (
                f"no kind is {fields.shown(context['tag'])} (allowed: {context['expected_tags']})"
            )
    value = "empty" if problem["input"] is None else fields.shown(problem["input"])
    return f"{value} ({problem['msg']})"


@cache
def _field_names() -> list[str]:
    schema = Scenario.model_json_schema()
    parts = [schema, *schema["$defs"].values()]
    return sorted({name for part in parts for name in part["properties"]})


@dataclass(frozen=True, slots=True)
class ScenarioFile:
    """What a scenario file holds, before it is known what counts instead of some of it."""

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
        raise ScenarioError("\n".join(_complaints(error, parsed))) from None


def _put(plain: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        plain = plain[key]
    plain[keys[-1]] = value
