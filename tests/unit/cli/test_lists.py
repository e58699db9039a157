"""Too many seeds are refused before a list of them is made."""

from __future__ import annotations

import pytest

from evenstride.cli.lists import MOST_SEEDS, split_seeds
from evenstride.errors import ConfigError
from tests.unit.cli.conftest import Shell


def test_as_many_seeds_as_allowed_are_made() -> None:
    assert split_seeds(str(MOST_SEEDS)) == tuple(range(MOST_SEEDS))
    assert split_seeds(",".join(map(str, range(MOST_SEEDS)))) == tuple(range(MOST_SEEDS))


@pytest.mark.parametrize("text", [str(MOST_SEEDS + 1), "20261121", " 999999999 "])
def test_too_many_seeds_are_refused_with_the_way_to_name_a_single_one(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_seeds(text)

    assert str(caught.value) == (
        f"{text.strip()} seeds are too many; give at most {MOST_SEEDS} of them, or "
        f"'{text.strip()},' for that single seed"
    )


def test_a_list_of_too_many_is_refused_as_well() -> None:
    with pytest.raises(ConfigError, match=r"10001 seeds are too many; give at most 10000 of them$"):
        split_seeds(",".join(map(str, range(MOST_SEEDS + 1))))


def test_a_large_number_may_name_a_single_seed() -> None:
    assert split_seeds("20261121,") == (20261121,)


def test_the_command_line_refuses_too_many_seeds(shell: Shell) -> None:
    answer = shell("simulate", "cluster.yaml", "--policy", "adaptive", "--seeds", "999999999")

    assert "give at most 10000 of them, or '999999999,' for that single seed" in answer.refusal()
