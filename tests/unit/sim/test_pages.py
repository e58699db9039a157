"""The pages on scenarios and policies name everything that can be set, and what it is if not."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import BaseModel

from evenstride.core.control.events import Exchanged, FleetFormed
from evenstride.core.fleet import Worker
from evenstride.core.policies import POLICY_NAMES, policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.sim.scenario.recordings import load_recording
from evenstride.sim.scenario.scenario_events import Event
from evenstride.sim.scenario.scenario_model import (
    Communication,
    Exchange,
    Scenario,
    WorkerGroup,
)
from evenstride.sim.scoring.suite import FIELDS
from evenstride.trace.codec import TraceWriter
from tests.messages import check_message

DOCS = Path(__file__).parents[3] / "docs"
SCENARIOS, RESULTS, POLICIES = (
    (DOCS / "reference" / f"{name}.md").read_text()
    for name in ("scenarios", "simulation-results", "policies")
)
HOW_TO = (DOCS / "how-to" / "simulate.md").read_text()
KINDS: tuple[type[BaseModel], ...] = get_args(get_args(Event)[0])
PLAIN = ("fraction", "factor", "cores", "degrees")
COMMON = ("at", "workers", "kind")


def section(page: str, heading: str) -> str:
    """Return what stands below a heading, up to the next one."""
    _, found, after = page.partition(f"\n{heading}\n")
    assert found, f"there is no heading {heading}"
    return re.split(r"\n#+ ", after)[0]


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the lines of a section's table."""
    lines = [line for line in section(page, heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def snippet(page: str, heading: str) -> str:
    found = re.search(r"```python\n(.*?)```", section(page, heading), re.DOTALL)
    assert found
    return found[1]


def units(name: str) -> tuple[str, ...]:
    """Return the units that the name of a field allows."""
    if name.endswith("_per_s"):
        return "samples/s", "bytes/s", "FLOP/s"
    ends = {"_s": "s", "_bytes": "bytes", "_batch": "samples", "_share": "samples"}
    mine = tuple(unit for end, unit in ends.items() if name.endswith(end))
    return mine or ("text", "list", "fields", "samples", "workers", "steps", *PLAIN)


def fits(reported: str, model: type[BaseModel], name: str) -> bool:
    """Return whether a page tells the default of a field."""
    field = model.model_fields[name]
    if field.is_required():
        return reported == "required"
    if isinstance(field.default, int | float | str) and field.default != "":
        return reported == (
            field.default if isinstance(field.default, str) else f"{field.default:g}"
        )
    return bool(reported) and reported != "required" and not reported[0].isdigit()


@pytest.mark.parametrize(
    ("heading", "model"),
    [
        ("### The scenario", Scenario),
        ("### Workers", WorkerGroup),
        ("### Communication", Communication),
        ("### Exchange", Exchange),
    ],
)
def test_every_field_is_in_its_table_with_its_unit_and_its_default(
    heading: str, model: type[BaseModel]
) -> None:
    found = rows(SCENARIOS, heading)

    assert [name.strip("`") for name, *_ in found] == list(model.model_fields)
    for name, unit, default, meaning in found:
        assert fits(default, model, name.strip("`")), f"{name} has the default {default}"
        assert unit
        assert len(meaning) > 5
        assert unit in units(name.strip("`"))


def test_every_field_of_an_event_is_in_the_table_of_events() -> None:
    found = rows(SCENARIOS, "### Events")
    models = {n: kind for kind in KINDS for n in get_args(kind.model_fields["kind"].annotation)}
    known = {(n, name) for n, kind in models.items() for name in kind.model_fields} - {
        (n, name) for n in models for name in COMMON
    }

    assert {(kind.strip("`"), name.strip("`")) for kind, name, *_ in found} == known
    for kind, name, unit, default, meaning in found:
        fit = fits(default, models[kind.strip("`")], name.strip("`"))
        assert fit, f"{name} of {kind} has the default {default}"
        assert unit
        assert len(meaning) > 5
    text = section(SCENARIOS, "### Events")
    assert all(f"`{name}`" in text for name in (*models, *COMMON))


def test_the_schema_has_the_units_of_ambiguous_fields() -> None:
    models: list[type[BaseModel]] = [WorkerGroup, Communication]
    reported = {n: str(f.description) for m in models for n, f in m.model_fields.items()}

    assert all(
        "second" in text or "FLOP/s" in text for n, text in reported.items() if n.endswith("_s")
    )
    assert "0.02 is 20 ms" in reported["fixed_s"]
    check_message(reported["noise"])
    assert "0.02 is 2 %" in reported["noise"]


def test_every_key_of_a_row_is_explained() -> None:
    keys = [key for _, key, _ in rows(RESULTS, "## What the columns mean")]

    assert sorted(re.findall(r"`(\w+)`", " ".join(keys))) == sorted(FIELDS)


def test_every_policy_is_in_the_table_with_all_its_settings() -> None:
    reported = {name.strip("`"): settings for name, _, settings, _ in rows(POLICIES, "## Policies")}

    assert sorted(reported) == sorted(POLICY_NAMES)
    for name in sorted(set(reported) - {"static"}):
        policy: Any = policy_from_spec(name)
        known = {f"{field.name}={getattr(policy, field.name)}" for field in fields(policy)}
        assert set(re.findall(r"`(\w+=[\w.]+)`", reported[name])) == known


def test_the_numbers_of_ones_own_machines_are_found_in_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worker 0 takes 20 ms and 1 ms a sample, with 5 % noise and a spike; 1 has one share only."""
    rng = np.random.default_rng(0)
    reported: list[Observation] = []
    for turn, share in enumerate([20, 40, 60]):
        noisy = np.exp(rng.normal(0.0, 0.05, 400)) * (0.02 + 0.001 * share)
        noisy[3] *= 30.0
        waits = (0.0,) * len(noisy)
        reported.append(Observation(0, share, 400 * turn, tuple(noisy.tolist()), waits))
        reported.append(Observation(1, 9, 400 * turn, (0.1, float("nan")) * 200, waits))
    reported.append(Observation(0, 5, 1200, (9.0,) * 90, (0.0,) * 90, modelled=False))
    with TraceWriter(tmp_path / "runs/today/trace.jsonl", {"policy": "adaptive"}) as writer:
        writer.event(0.0, FleetFormed(0, 0, 69, (Worker("a"), Worker("b"))), ())
        writer.event(1.0, Exchanged(1300, 1301, Measurements.of(reported)), ())

    printed = run(HOW_TO, "## Numbers of your own machines", tmp_path, monkeypatch, capsys)

    first, second = printed.splitlines()
    figures = re.fullmatch(r"worker 0: samples_per_s (.*), fixed_s (.*), noise (.*)", first)
    assert figures
    speed, fixed_s, noise = map(float, figures.groups())
    assert speed == pytest.approx(1000, rel=0.1)
    assert fixed_s == pytest.approx(0.02, abs=0.004)
    assert noise == pytest.approx(0.05, rel=0.2)
    check_message(second, "worker 1")


def test_a_recording_is_made_of_the_published_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in ("20110303", "20110322", "20110412"):
        (tmp_path / day).mkdir()
        for name, load in (("b", 7), ("a", 3)):
            (tmp_path / day / name).write_text(f"{load}\n" * 289)

    run(HOW_TO, "## Recorded load", tmp_path, monkeypatch, capsys)

    monkeypatch.setenv("EVENSTRIDE_DATA", "data")
    load_recording.cache_clear()
    assert load_recording("20110412").shape == (2, 288)
    assert load_recording("20110322")[:, 0].tolist() == [3.0, 7.0]
    load_recording.cache_clear()


def run(page: str, heading: str, folder: Path, monkeypatch: Any, capsys: Any) -> str:
    """Run a page's Python in a folder and return what it prints."""
    (folder / "snippet.py").write_text(snippet(page, heading))
    monkeypatch.chdir(folder)
    runpy.run_path("snippet.py")
    printed: str = capsys.readouterr().out
    return printed
