"""Check that the parts of a scenario fit together: its events, and who is there when."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import IntArray
from evenstride.sim.events import Event, Join, Leave, chosen
from evenstride.sim.parts import MOST_WORKERS, Place, refuse

if TYPE_CHECKING:
    from evenstride.sim.scenario import Scenario

Mask = npt.NDArray[np.bool_]


def check_scenario(scenario: Scenario) -> None:
    """Raise unless the scenario can be simulated.

    Raises:
        PydanticCustomError: names the field that does not fit.
    """
    if scenario.size > MOST_WORKERS:
        refuse(f"{scenario.size} workers are too many (allowed: 1 to {MOST_WORKERS})", "workers")
    for number, event in enumerate(scenario.events):
        _check_event(event, scenario, ("events", number))
    _check_membership(scenario)


def _check_event(event: Event, scenario: Scenario, place: Place) -> None:
    size, last = scenario.size, scenario.steps - 1
    who = chosen(event.workers, size)
    if max(who) >= size:
        refuse(f"{max(who)} is no worker (allowed: 0 to {size - 1})", *place, "workers")
    if event.at > last:
        refuse(f"{event.at} is no step (allowed: 0 to {last})", *place, "at")
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
    """Return who is there before any event: all but those whose first event is to join."""
    here = np.ones(scenario.size, dtype=np.bool_)
    for _, event in reversed(_moves(scenario)):
        here[chosen(event.workers, scenario.size)] = isinstance(event, Leave)
    return here


def _moves(scenario: Scenario) -> list[tuple[int, Leave | Join]]:
    """Return the changes of membership by step, each with its number among the events."""
    moves = [(n, e) for n, e in enumerate(scenario.events) if isinstance(e, Leave | Join)]
    return sorted(moves, key=lambda move: move[1].at)


def _check_membership(scenario: Scenario) -> None:
    here, bounds = there_from_start(scenario), _bounds(scenario)
    moves = _moves(scenario)
    if not moves or moves[0][1].at > 0:
        _check_those(here, bounds, scenario, 0, ("global_batch",))
    for at, together in groupby(moves, key=lambda move: move[1].at):
        place: Place = ()
        for number, event in together:
            place = ("events", number, "workers")
            _move(here, event, scenario.size, place)
        _check_those(here, bounds, scenario, at, place)


def _move(here: Mask, event: Leave | Join, size: int, place: Place) -> None:
    """Let workers come or go, in place."""
    who, joins = np.array(chosen(event.workers, size)), isinstance(event, Join)
    wrong = who[here[who] == joins]
    if len(wrong):
        state = "there already" if joins else "not there"
        refuse(f"worker {wrong[0]} is {state} at step {event.at}", *place)
    here[who] = joins


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
