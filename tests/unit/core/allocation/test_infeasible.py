"""Bounds in which no split fits, as a user reads of them: own settings, numbers, a way out."""

from __future__ import annotations

from typing import Any

import pytest

from evenstride.core.control.advance import advance
from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.errors import InfeasibleShares
from tests.messages import check_message, raises_message

# Global batch, each worker's settings, what the text ends with, and a change that it names.
Settings = list[dict[str, Any]]
REFUSED: dict[str, tuple[int, Settings, tuple[str, ...], int, Settings]] = {
    "a quantum too large": (
        10,
        [{"quantum": 8}] * 2,
        ("16",),
        10,
        [{"quantum": 5}] * 2,
    ),
    "a quantum above the global batch": (
        10,
        [{"quantum": 16}] * 2,
        ("32", "16"),
        32,
        [{"quantum": 16}] * 2,
    ),
    "different quanta": (
        20,
        [{"quantum": 8}, {"quantum": 16}],
        ("24", "16", "10"),
        20,
        [{"quantum": 10}] * 2,
    ),
    "a quantum and a min_share": (
        30,
        [{"quantum": 8, "min_share": 9}] * 2,
        ("min_share is 9", "32"),
        32,
        [{"quantum": 8, "min_share": 9}] * 2,
    ),
    "a min_share too large": (
        10,
        [{"min_share": 8}] * 2,
        ("16", "min_share is 8"),
        10,
        [{"min_share": 5}] * 2,
    ),
    "min_shares that differ": (
        10,
        [{}, {"min_share": 20}],
        ("21", "min_share is 1", "20"),
        10,
        [{}, {"min_share": 5}],
    ),
    "more workers than samples": (
        3,
        [{}] * 4,
        (),
        4,
        [{}] * 4,
    ),
    "a max_share too small": (
        10,
        [{"max_share": 4}] * 2,
        ("max_share is 4",),
        10,
        [{"max_share": 5}] * 2,
    ),
    "a max_share that is no multiple": (
        40,
        [{"max_share": 20, "quantum": 8}] * 2,
        ("16", "36", "max_share is 20"),
        40,
        [{"max_share": 24, "quantum": 8}] * 2,
    ),
    "a max_share below the quantum": (
        30,
        [{"quantum": 8}, {"quantum": 8, "max_share": 7}],
        ("worker 1", "7 samples", "min_share"),
        30,
        [{"quantum": 8}, {"quantum": 8, "max_share": 8}],
    ),
}


def _form(batch: int, settings: Settings) -> None:
    workers = tuple(Worker(f"h/{rank}", **own) for rank, own in enumerate(settings))
    advance(Control(policy_from_spec("adaptive")), FleetFormed(0, 0, batch, workers))


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_split_names_the_settings_and_a_remedy_that_works(name: str) -> None:
    batch, settings, text, batch_then, settings_then = REFUSED[name]

    with pytest.raises(InfeasibleShares) as refusal:
        _form(batch, settings)

    check_message(str(refusal.value), batch, *text)
    _form(batch_then, settings_then)


def test_settings_of_a_rank_left_out_do_not_count() -> None:
    workers = tuple(Worker(str(k), max_share=n, quantum=8) for k, n in enumerate((32, 20, 12)))
    control: Control = Control(policy_from_spec("static:0,20,12"))

    with raises_message(InfeasibleShares, "max_share is 12", "20"):
        advance(control, FleetFormed(0, 0, 32, workers))


def test_many_values_are_shown_as_a_range() -> None:
    refusal: Any = InfeasibleShares(5, 60, None, 6, fewest=(1, 2, 3, 7, 47))

    assert "because min_share is 1 to 47;" in str(refusal)
