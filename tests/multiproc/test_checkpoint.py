"""Checkpoints of several ranks: any number of them goes on as one process would have."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from evenstride.runtime.checkpoint.format.manifest import parse_name
from evenstride.testing import RankPool
from tests.messages import check_message
from tests.multiproc.checkpointing import Run, Seen, alone, checkpoints, go, refusal
from tests.multiproc.sharded import needs_shards_on_cpu
from tests.multiproc.training import relative_error

# Weights of one trajectory, summed in another order.
CLOSE = 1e-12


def _follows(seen: list[Seen], expected: list[list[float]]) -> None:
    for one in seen:
        assert len(one.weights) == len(expected)
        assert max(map(relative_error, one.weights, expected)) < CLOSE


def _steps(folder: str | Path) -> list[int]:
    names = [parse_name(text) for text in checkpoints(folder)]
    return sorted(name.step for name in names if name is not None)


def _reported(seen: Seen, what: str) -> list[str]:
    return [text for text in seen.reported if what in text]


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=needs_shards_on_cpu)])
def test_a_run_goes_on_with_fewer_ranks_and_with_more(
    ranks: RankPool, tmp_path: Path, engine: str
) -> None:
    run = Run(str(tmp_path), steps=4, engine=engine)
    expected, done = alone(replace(run, steps=20)), 0

    for world_size in (4, 3, 1, 2, 4):
        here = run if world_size > 1 else replace(run, engine="plain")
        seen = ranks.run(go, world_size, here)
        assert {one.restored for one in seen} == {done or None}
        assert not any(one.error or one.reported for one in seen)
        _follows(seen, expected[done : done + 4])
        done += 4


@needs_shards_on_cpu
def test_sharded_and_replicated_models_read_each_others_checkpoints(
    ranks: RankPool, tmp_path: Path
) -> None:
    run, done = Run(str(tmp_path), steps=4), 0
    expected = alone(replace(run, steps=16))

    for engine in ("hsdp", "ddp", "fsdp", "hsdp"):
        seen = ranks.run(go, 4, replace(run, engine=engine))
        _follows(seen, expected[done : done + 4])
        done += 4


@pytest.mark.parametrize(
    ("engine", "count"), [("ddp", 3), pytest.param("hsdp", 4, marks=needs_shards_on_cpu)]
)
def test_what_several_have_is_written_in_equal_parts(
    ranks: RankPool, tmp_path: Path, engine: str, count: int
) -> None:
    ranks.run(go, count, Run(str(tmp_path), steps=4, engine=engine, wide=5000))

    (name,) = checkpoints(tmp_path)
    sizes = [path.stat().st_size for path in sorted((tmp_path / name).glob("tensors-*"))]
    model_bytes = 3 * (5000 * 7 + 1) * 8  # weights and Adam's two states
    assert len(sizes) == count
    assert sum(sizes) < model_bytes * 1.05
    assert max(sizes) < model_bytes / count * 1.2, "FSDP2 itself shards by whole rows"


def test_each_rank_goes_on_with_its_own_random_numbers(ranks: RankPool, tmp_path: Path) -> None:
    run = Run(str(tmp_path), steps=4)
    ranks.run(go, 2, run)

    same = [one.drawn for one in ranks.run(go, 2, replace(run, steps=1))]
    more = [one.drawn for one in ranks.run(go, 3, replace(run, steps=1))]
    again = [one.drawn for one in ranks.run(go, 3, replace(run, steps=1))]

    assert more[:2] == same
    assert more == again, "a rank that is new draws the same each time"
    assert len({value for drawn in more for value in drawn}) == 9, "and none draws another's"


@pytest.mark.parametrize("broken", ["tensors-00001.bin", "items-00002.jsonl", "metadata.json"])
def test_damage_that_one_rank_finds_is_passed_over_by_all(
    ranks: RankPool, tmp_path: Path, broken: str
) -> None:
    run = Run(str(tmp_path), steps=4, every=2)
    ranks.run(go, 3, run)
    newest = next(path for path in tmp_path.iterdir() if path.name.startswith("step-000000004"))
    data = bytearray((newest / broken).read_bytes())
    data[len(data) // 2] ^= 4
    (newest / broken).write_bytes(data)

    seen = ranks.run(go, 3, run)

    assert [one.restored for one in seen] == [2, 2, 2]
    assert [len(_reported(one, "is skipped")) for one in seen] == [1, 0, 0]
    (reported,) = _reported(seen[0], "is skipped")
    assert f"{newest.name} is skipped: {newest.name}/{broken} differs" in reported
    _follows(seen, alone(replace(run, steps=6))[2:])


@pytest.mark.parametrize(
    ("rank", "ending"),
    [(2, "manifest.json"), (0, "metadata.json"), (1, ".bin")],
)
def test_a_file_that_one_rank_cannot_read_is_an_error_on_all_and_no_damage(
    ranks: RankPool, tmp_path: Path, rank: int, ending: str
) -> None:
    run = Run(str(tmp_path), steps=4, every=2)
    ranks.run(go, 3, run)
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*")}

    seen = ranks.run(go, 3, replace(run, unreadable=(rank, ending)))

    assert len({one.error for one in seen}) == 1
    assert seen[0].error.startswith("CheckpointError: step-000000004")
    assert "OSError: [Errno 5] Input/output error" in seen[0].error
    check_message(seen[0].error)
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*")} == before
    again = ranks.run(go, 3, replace(run, steps=1))
    assert [one.restored for one in again] == [4, 4, 4]


@pytest.mark.parametrize("denied", [(0, 0), (1, 0), (0, 2), (0, 3), (1, 1)], ids=str)
def test_a_rank_that_cannot_write_costs_the_checkpoint_on_all_ranks_alike(
    ranks: RankPool, tmp_path: Path, denied: tuple[int, int]
) -> None:
    run = Run(str(tmp_path), steps=4, every=4, denied=denied)

    seen = ranks.run(go, 2, run)

    assert {one.report["failed"] for one in seen} == {2}, "the save that was due, the last try"
    assert all("No space left on device" in one.error for one in seen)
    reported = [_reported(one, "was not saved") for one in seen]
    assert [len(each) for each in reported] == [1, 0], "one warning, not one per rank"
    assert f"rank {denied[0]}" in reported[0][0]
    _follows(seen, alone(run))
    again = ranks.run(go, 2, replace(run, denied=None))
    assert {one.restored for one in again} == {None}
    _follows(again, alone(run))
    # What is left of the attempt goes, unless only its manifest is missing: it could be lost.
    assert _steps(tmp_path) == ([4, 4] if denied == (0, 3) else [4])


def test_a_failed_checkpoint_leaves_the_one_before(ranks: RankPool, tmp_path: Path) -> None:
    run = Run(str(tmp_path), steps=4, every=2, denied=(1, 2))
    ranks.run(go, 2, run)

    seen = ranks.run(go, 2, replace(run, denied=None, steps=2))

    assert [one.restored for one in seen] == [2, 2]
    _follows(seen, alone(replace(run, steps=4))[2:])


def test_ranks_with_different_models_are_refused_when_they_save(
    ranks: RankPool, tmp_path: Path
) -> None:
    run = Run(str(tmp_path), steps=2, every=2, odd=(7, 8))

    seen = ranks.run(go, 2, run)

    assert all("the states of rank 0 and rank 1 differ" in one.error for one in seen)


def test_another_run_is_refused_alike_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(go, 2, Run(str(tmp_path), steps=4))

    refused = ranks.run(refusal, 2, Run(str(tmp_path), steps=4, seed=1))

    assert refused[0] == refused[1]
    check_message(refused[0], 'allow=("seed",)')


def test_what_the_leader_asks_for_is_saved_by_all_at_one_step(
    ranks: RankPool, tmp_path: Path
) -> None:
    run = Run(str(tmp_path), steps=60, every="1h", ask=3)

    seen = ranks.run(go, 2, run)

    assert [one.report["saved"] for one in seen] == [1, 1]
    (step,) = _steps(tmp_path)
    assert 3 < step <= 60
    _follows(ranks.run(go, 2, replace(run, steps=1)), alone(replace(run, steps=step + 1))[step:])


def test_a_manifest_lists_the_saved_state(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(go, 2, Run(str(tmp_path), steps=4))

    (name,) = checkpoints(tmp_path)
    reported = json.loads((tmp_path / name / "manifest.json").read_text().partition("\n")[0])

    assert (reported["format"], reported["step"], reported["world_size"]) == (1, 4, 2)
    assert sorted(reported["files"]) == sorted(
        ["metadata.json"] + [f"{kind}-0000{r}.{end}" for r in (0, 1) for kind, end in KINDS]
    )
    assert reported["data"]["length"] == 120
    assert reported["stride"]["position"] == 96
    assert math.isfinite(reported["created_unix_s"])


KINDS = [("tensors", "bin"), ("items", "jsonl")]
