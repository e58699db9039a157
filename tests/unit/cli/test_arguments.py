"""Numbers out of range are refused, too many seeds before a list of them is made."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from pydantic import TypeAdapter, ValidationError

from evenstride.cli.arguments import (
    MOST_LAG,
    MOST_SEEDS,
    MOST_STEPS,
    read_every,
    split_lags,
    split_seeds,
    whole,
)
from evenstride.errors import ConfigError
from evenstride.sim.scenario.scenario_events import Lag, Length
from tests.messages import check_message, raises_message
from tests.unit.cli.conftest import Shell


def test_as_many_seeds_as_allowed_are_made() -> None:
    assert split_seeds(str(MOST_SEEDS)) == tuple(range(MOST_SEEDS))
    assert split_seeds(",".join(map(str, range(MOST_SEEDS)))) == tuple(range(MOST_SEEDS))


@pytest.mark.parametrize("text", [str(MOST_SEEDS + 1), "20261121", " 999999999 "])
def test_too_many_seeds_are_refused_with_the_way_to_name_a_single_one(text: str) -> None:
    with raises_message(ConfigError, MOST_SEEDS, f"'{text.strip()},'"):
        split_seeds(text)


def test_a_list_of_too_many_is_refused_as_well() -> None:
    with raises_message(ConfigError, "10001", "10000"):
        split_seeds(",".join(map(str, range(MOST_SEEDS + 1))))


def test_a_large_number_may_name_a_single_seed() -> None:
    assert split_seeds("20261121,") == (20261121,)


def test_the_command_line_refuses_too_many_seeds(shell: Shell) -> None:
    answer = shell("simulate", "cluster.yaml", "--policy", "adaptive", "--seeds", "999999999")

    check_message(answer.refusal(), "10000", "'999999999,'")


# Python reads other digits than these, and refuses to read very many.
NO_NUMBERS = ["", "-1", "+1", "1.5", " 1", "1_0", "²", "٣", "0" * 19 + "1" + "0" * 10, "9" * 5000]


@pytest.mark.parametrize("text", ["0", str(MOST_STEPS + 1), *NO_NUMBERS])
def test_an_invalid_or_out_of_range_number_is_refused(text: str) -> None:
    with raises_message(typer.BadParameter, MOST_STEPS):
        whole(1, MOST_STEPS)(text)
    with raises_message(ConfigError, MOST_STEPS, "10"):
        read_every(text)


def test_a_number_at_the_end_of_its_range_is_read() -> None:
    assert [whole(1, MOST_STEPS)(text) for text in ("1", str(MOST_STEPS))] == [1, MOST_STEPS]
    assert [read_every(text) for text in ("1", str(MOST_STEPS))] == [1, MOST_STEPS]
    assert split_lags(f"1,{MOST_LAG}") == (1, MOST_LAG)


def test_numbers_of_steps_may_be_the_leader_or_missing() -> None:
    assert (read_every("leader"), read_every(None), split_lags(None)) == ("leader", None, ())


@pytest.mark.parametrize(("most", "field"), [(MOST_LAG, Lag), (MOST_STEPS, Length)])
def test_the_most_that_can_be_asked_is_what_scenario_files_may_say(most: int, field: Any) -> None:
    assert TypeAdapter(field).validate_python(most) == most
    with pytest.raises(ValidationError):
        TypeAdapter(field).validate_python(most + 1)
