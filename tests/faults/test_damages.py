"""A restart with damaged checkpoints is exact, falls back and says so, or refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.damages import judge, saved

CASES, BLOCK = 60, 10

Three = tuple[Path, dict[int, list[list[float]]]]


@pytest.fixture(scope="module")
def three(
    tmp_path_factory: pytest.TempPathFactory,
) -> Three:
    """A folder of three checkpoints, and the tensors of each."""
    origin = tmp_path_factory.mktemp("three") / "kept"
    return origin, saved(origin)


@pytest.mark.parametrize("first", range(0, CASES, BLOCK))
def test_random_damage_never_restarts_from_scratch_and_never_deletes(
    three: Three, tmp_path: Path, first: int
) -> None:
    for seed in range(first, first + BLOCK):
        folder = tmp_path / str(seed)
        verdict = judge(*three, folder, seed)
        assert verdict.outcome == "exact" or verdict.reported
