"""Parameters are placed on servers whole, and evenly by bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.sync_modes.mode_specs import place
from evenstride.errors import ConfigError
from tests.messages import raises_message


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40), st.data())
def test_every_server_has_parameters_and_no_server_has_many_more(
    sizes: list[int], data: st.DataObject
) -> None:
    servers = data.draw(st.integers(1, len(sizes)))

    places = place(sizes, servers)

    held = [sum(s for s, p in zip(sizes, places, strict=True) if p == k) for k in range(servers)]
    assert len(places) == len(sizes)
    assert set(places) == set(range(servers))
    # Who has most had least before its last one came.
    assert max(held) <= sum(held) / servers + max(sizes)


def test_the_largest_are_placed_first_and_those_without_elements_too() -> None:
    assert place([1, 1, 8, 4], servers=2) == (1, 1, 0, 1)
    assert place([0, 0], servers=2) == (0, 1)


def test_a_model_without_parameters_is_refused() -> None:
    with raises_message(ConfigError):
        place([], servers=1)


@pytest.mark.parametrize("servers", [0, 3])
def test_more_servers_than_parameters_are_refused_with_the_range(servers: int) -> None:
    with raises_message(ConfigError):
        place([4, 4], servers)
