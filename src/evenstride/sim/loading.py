"""Read a scenario file, and say exactly what is wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from evenstride.errors import ScenarioError
from evenstride.sim.complaints import complaints
from evenstride.sim.reading import Parsed, read_yaml
from evenstride.sim.scenario import MAY_BE_CUT, Replay, Scenario, chosen
from evenstride.sim.timeline import load_recording


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
    parsed = read_yaml(path)
    try:
        scenario = Scenario.model_validate(parsed.plain)
    except ValidationError as error:
        raise ScenarioError("\n".join(complaints(error, parsed))) from None
    _check_recordings(scenario, parsed)
    return changed(scenario, changes) if changes else scenario


def changed(scenario: Scenario, changes: dict[str, Any]) -> Scenario:
    """Return a scenario with other values; see `load_scenario`.

    Raises:
        ScenarioError: a value is out of range.
    """
    plain = scenario.model_dump()
    for key, value in changes.items():
        _put(plain, key.split("."), value)
    try:
        return Scenario.model_validate(plain, context=MAY_BE_CUT)
    except ValidationError as error:
        parsed = Parsed(scenario.name, plain, {})
        raise ScenarioError("\n".join(complaints(error, parsed))) from None


def _put(plain: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        plain = plain[key]
    plain[keys[-1]] = value


def _check_recordings(scenario: Scenario, parsed: Parsed) -> None:
    """Raise unless the recordings that are replayed are there, and have machines enough."""
    for number, event in enumerate(scenario.events):
        if not isinstance(event, Replay):
            continue
        try:
            machines = len(load_recording(event.day))
        except ScenarioError as error:
            raise ScenarioError(parsed.said(("events", number, "kind"), str(error))) from None
        workers, rows = len(chosen(event.workers, scenario.size)), event.machines or []
        if max(rows, default=0) >= machines:
            problem = f"{max(rows)} (allowed: a machine from 0 to {machines - 1})"
            raise ScenarioError(parsed.said(("events", number, "machines"), problem))
        if not rows and workers > machines:
            problem = (
                f"{workers} workers, but {machines} machines were recorded (allowed: at most as "
                "many workers; or name the machines, some of them more than once)"
            )
            raise ScenarioError(parsed.said(("events", number, "workers"), problem))
