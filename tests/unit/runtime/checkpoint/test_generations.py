"""The generation in a checkpoint's name: a run that begins later has a later one."""

from __future__ import annotations

from evenstride.runtime.checkpoint.manifest import Name
from evenstride.runtime.checkpoint.retention import later_run, next_generation
from tests.unit.runtime.checkpoint.kept import MemoryStorage


def holding(*generations: str) -> MemoryStorage:
    """Return a store with an unfinished attempt of each generation."""
    storage = MemoryStorage()
    for generation in generations:
        storage.write(f"step-000000001-{generation}-0/items-00000.jsonl", [b"x"])
    return storage


def test_it_is_the_time_and_what_was_drawn() -> None:
    assert next_generation(holding(), 0x12345678 + 0.9, 0xABC) == "123456780abc"


def test_a_run_whose_clock_is_behind_begins_later_than_those_before_all_the_same() -> None:
    storage = holding("6000000000ff", "70000000ffff")

    assert next_generation(storage, float(0x60000000), 0) == "700000010000"


def test_it_never_begins_anew_at_the_largest_number() -> None:
    storage = holding("fffffffe0000", "ffffffff0001")

    generation = next_generation(storage, 1.8e9, 0x0002)

    assert generation == "ffffffff0002"
    assert later_run(storage, Name(5, generation, 0)) is None
