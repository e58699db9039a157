"""Check that the parts of a scenario fit together: its events, and who is there when."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.sim.events import Event, Join, Leave, Notice, Replay, SpeedStep, chosen
from evenstride.sim.parts import FASTEST, MOST_WORKERS, SLOWEST, Place, refuse

if TYPE_CHECKING:
    from evenstride.sim.scenario import Scenario

Mask = npt.NDArray[np.bool_]

_ROUNDING = 1e-9  # of sums of logarithms


def check_scenario(scenario: Scenario, *, to_its_end: bool = True) -> None:
    """Raise unless the scenario can be simulated.

    Args:
        scenario: to check.
        to_its_end: whether every event has to begin within its steps.

    Raises:
        PydanticCustomError: names the field that does not fit.
    """
    if scenario.size > MOST_WORKERS:
        refuse(f"{scenario.size} workers are too many (allowed: 1 to {MOST_WORKERS})", "workers")
    for number, event in enumerate(scenario.events):
        place: Place = ("events", number)
        if to_its_end and event.at >= scenario.steps:
            allowed = f"allowed: 0 to {scenario.steps - 1}"
            refuse(f"{event.at} is no step ({allowed})", *place, "at")
        _check_event(event, scenario, place)
    _check_membership(scenario)
    _check_speeds(scenario)


def _check_event(event: Event, scenario: Scenario, place: Place) -> None:
    size = scenario.size
    who = chosen(event.workers, size)
    if max(who) >= size:
        refuse(f"{max(who)} is no worker (allowed: 0 to {size - 1})", *place, "workers")
    until = getattr(event, "until", None)
    if until is not None and until <= event.at:
        refuse(f"{until} is not after at (allowed: {event.at + 1} or later)", *place, "until")
    machines = getattr(event, "machines", None)
    if machines is not None and len(machines) != len(who):
        refuse(
            f"{len(machines)} machines for {len(who)} workers (allowed: one for each)",
            *place,
            "machines",
        )


def there_from_start(scenario: Scenario) -> Mask:
    """Return who is there before any event: all but those whose first event is to join.

    Events after the last step count too: who would only have joined then was not there before.
    """
    here = np.ones(scenario.size, dtype=np.bool_)
    for _, event in reversed(_moves(scenario)):
        if isinstance(event, Notice):
            continue
        here[chosen(event.workers, scenario.size)] = isinstance(event, Leave)
    return here


def _moves(scenario: Scenario) -> list[tuple[int, Leave | Join | Notice]]:
    """Return the changes of membership by step, each with its number among the events."""
    moves = [(n, e) for n, e in enumerate(scenario.events) if isinstance(e, Leave | Join | Notice)]
    return sorted(moves, key=lambda move: move[1].at)


def _check_membership(scenario: Scenario) -> None:
    here, bounds = there_from_start(scenario), _bounds(scenario)
    told = np.zeros_like(here)
    moves = _moves(scenario)
    if not here.any() and moves and moves[0][1].at > 0:
        problem = "nobody is there before them, at step 0 (allowed: some of the workers, not all)"
        refuse(problem, "events", moves[0][0], "workers")
    if not moves or moves[0][1].at > 0:
        _check_those(here, bounds, scenario, 0, ("global_batch",))
    for at, together in groupby(moves, key=lambda move: move[1].at):
        place: Place = ()
        for number, event in together:
            place = ("events", number, "workers")
            if isinstance(event, Notice):
                _tell(here, told, event, scenario.size, place)
            else:
                _move(here, event, scenario.size, place)
                told[chosen(event.workers, scenario.size)] = False
        serving = here & ~told
        _check_those(serving if serving.any() else here, bounds, scenario, at, place)


def _move(here: Mask, event: Leave | Join, size: int, place: Place) -> None:
    """Let workers come or go, in place."""
    who, joins = np.array(chosen(event.workers, size)), isinstance(event, Join)
    wrong = who[here[who] == joins]
    if len(wrong):
        state, fit = ("there already", "not there") if joins else ("not there", "there")
        problem = f"worker {wrong[0]} is {state} at step {event.at}"
        refuse(f"{problem} (allowed: workers that are {fit} then)", *place)
    here[who] = joins


def _tell(here: Mask, told: Mask, event: Notice, size: int, place: Place) -> None:
    """Let workers know that they will be taken away, or that they will not, in place."""
    who, notice = np.array(chosen(event.workers, size)), event.kind == "notice"
    wrong = who[~here[who] | (told[who] == notice)]
    if len(wrong):
        gone = not here[wrong[0]]
        state = "not there" if gone else "told so already" if notice else "not about to leave"
        fit = "there and not told" if notice else "told to leave"
        problem = f"worker {wrong[0]} is {state} at step {event.at}"
        refuse(f"{problem} (allowed: workers that are {fit} then)", *place)
    told[who] = notice


def _bounds(scenario: Scenario) -> tuple[IntArray, IntArray]:
    """Return the fewest and the most samples of every worker."""
    batch, counts = scenario.global_batch, [group.count for group in scenario.workers]
    most = [batch if g.max_share is None else min(g.max_share, batch) for g in scenario.workers]
    lower = np.repeat([group.min_share for group in scenario.workers], counts)
    return lower, np.repeat(most, counts)


def _check_those(
    here: Mask, bounds: tuple[IntArray, IntArray], scenario: Scenario, step: int, place: Place
) -> None:
    """Raise unless those who are there can share the global batch."""
    workers, batch = int(here.sum()), scenario.global_batch
    if not workers:
        refuse(f"no worker is there at step {step} (allowed: at least 1)", *place)
    least, most = (int(bound[here].sum(dtype=np.float64)) for bound in bounds)
    if not least <= batch <= most:
        at_once = "worker" if workers == 1 else f"{workers} workers"
        refuse(
            f"a global batch of {batch} cannot be shared by the {at_once} there at step {step} "
            f"(allowed by min_share and max_share: {least} to {most})",
            *place,
        )


def _check_speeds(scenario: Scenario) -> None:
    """Raise unless every worker's speed stays within its range when events overlap."""
    turns = []
    for number, event in enumerate(scenario.events):
        if not isinstance(event, Leave | Join | Notice):
            turns.append((event.at, False, number))
            until = getattr(event, "until", None)
            turns += [] if until is None else [(until, True, number)]
    logs = np.zeros((2, scenario.size))  # of the least and of the greatest possible speed
    for _, together in groupby(sorted(turns), key=lambda turn: turn[0]):
        numbers: list[int] = []
        for _, ends, number in together:
            event = scenario.events[number]
            numbers.append(number)
            who = slice(None) if event.workers == "all" else chosen(event.workers, scenario.size)
            logs[:, who] += (-1 if ends else 1) * np.log(_extremes(event))[:, None]
        _check_range(logs, scenario, numbers)


def _extremes(event: Event) -> tuple[float, float]:
    """Return the least and the greatest multiple of its speed that an event gives a worker."""
    if isinstance(event, SpeedStep):
        return event.speed, event.speed
    speed: float = event.least_speed if isinstance(event, Replay) else getattr(event, "speed", 1.0)
    return min(speed, 1.0), max(speed, 1.0)


def _check_range(logs: FloatArray, scenario: Scenario, numbers: list[int]) -> None:
    """Raise if a worker's speed may be out of range once these events have begun or ended."""
    for worker, log in ((logs[0].argmin(), logs[0].min()), (logs[1].argmax(), logs[1].max())):
        if math.log(SLOWEST) - _ROUNDING <= log <= math.log(FASTEST) + _ROUNDING:
            continue
        events = {n: scenario.events[n] for n in numbers}
        mine = [n for n, event in events.items() if worker in chosen(event.workers, scenario.size)]
        refuse(
            f"with the events at the same time the speed of worker {worker} comes to "
            f"{math.exp(log):g} (allowed: {SLOWEST:g} to {FASTEST:g} in all)",
            *("events", mine[-1]),
            "least_speed" if isinstance(events[mine[-1]], Replay) else "speed",
        )
