"""Which attempts are deleted once a newer one is complete, and the order of their files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evenstride.runtime.checkpoint.format.manifest import MANIFEST as MANIFEST_FILE
from evenstride.runtime.checkpoint.format.manifest import (
    METADATA,
    Manifest,
    Name,
    encode,
    items_file,
    tensors_file,
)
from evenstride.runtime.checkpoint.format.retention import (
    COMPLETED,
    Lineage,
    attempts,
    delete,
    descended,
    later_run,
    next_generation,
    prune,
    to_delete,
)
from evenstride.runtime.checkpoint.format.storage import PatientReader
from tests.unit.runtime.checkpoint.format.test_manifest import MANIFEST
from tests.unit.runtime.checkpoint.kept import MemoryStorage

OLD, NOW, LATER = "100000000000", "200000000000", "300000000000"
A, B, C, D = (Name(step, NOW, 0) for step in (1, 2, 3, 4))


class Noting(MemoryStorage):
    """A store that records deletions in order."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[str] = []

    def delete(self, name: str) -> None:
        """Delete a file."""
        self.deleted.append(name)
        super().delete(name)

    def delete_folder(self, folder: str) -> None:
        """Note that a folder is deleted."""
        self.deleted.append(folder)


def _holding(complete: list[Name], begun: list[Name] | None = None) -> Noting:
    storage = Noting()
    for name in [*complete, *(begun or [])]:
        storage.write(name.file(tensors_file(0)), [b"x"])
        storage.write(name.file(items_file(0)), [b"x"])
    for name in complete:
        storage.write(name.file(MANIFEST_FILE), [b"{}"])
    return storage


def test_attempts_are_listed_newest_first_and_by_run() -> None:
    late, old = Name(1, LATER, 0), Name(9, OLD, 3)
    storage = _holding([A, late, B], [old, C])
    storage.write("notes.txt", [b"x"])

    assert attempts(storage) == ([late, B, A], [C, old])


def test_keep_checkpoints_since_the_restart_are_kept() -> None:
    assert to_delete([D, C, B, A], [], D, 1, Lineage()) == [C, B, A]
    assert to_delete([D, C, B, A], [], D, 3, Lineage()) == [A]


def test_checkpoints_of_other_runs_are_never_deleted() -> None:
    whole, damaged, begun = (Name(step, OLD, 0) for step in (1, 2, 3))

    assert to_delete([C, B, damaged, whole], [begun], C, 1, Lineage()) == [B]


def test_the_restored_checkpoint_is_deleted_like_an_own_one() -> None:
    damaged, restored = Name(4, OLD, 0), Name(2, OLD, 0)
    lineage = Lineage(restored, damaged=frozenset({damaged}))

    assert to_delete([A, damaged, restored], [], A, 1, lineage) == [restored]
    assert to_delete([A, damaged, restored], [], A, 2, lineage) == []
    assert to_delete([B, A, damaged, restored], [], B, 2, lineage) == [restored]


def test_after_a_restart_twice_as_many_are_kept_until_enough_are_written() -> None:
    restored, before = Name(9, OLD, 0), [Name(step, OLD, 0) for step in (8, 7, 6)]
    lineage = Lineage(restored, frozenset(before))

    assert to_delete([A, restored, *before], [], A, 2, lineage) == [before[-1]]
    assert to_delete([B, A, restored, *before], [], B, 2, lineage) == [restored, *before]


def test_an_own_damaged_checkpoint_is_deleted_and_does_not_count() -> None:
    lineage = Lineage(B, damaged=frozenset({C}))

    assert to_delete([D, C, B, A], [], D, 2, lineage) == [A, C]


def test_later_attempts_stay_and_unfinished_ones_are_deleted() -> None:
    late, begun = Name(3, LATER, 0), Name(1, LATER, 0)
    old, mine = Name(3, OLD, 1), Name(1, NOW, 7)

    lineage = Lineage(B)

    assert to_delete([late, C], [begun, mine, old], C, 2, lineage) == [mine]
    assert to_delete([late, C, B], [begun, mine, old], C, 2, lineage) == [mine]


RUN, OTHER = "1" * 32, "2" * 32


def _written(storage: MemoryStorage, name: Name, run: str, *earlier: Name) -> Manifest:
    manifest = replace(MANIFEST, step=name.step, run=run, earlier=tuple(map(str, earlier)))
    storage.write(name.file(MANIFEST_FILE), [encode(manifest)])
    return manifest


def _descended(storage: MemoryStorage, restored: Name, manifest: Manifest, *passed: Name) -> Any:
    return descended(restored, manifest, attempts(storage)[0], passed, PatientReader(storage))


def test_the_lineage_of_a_run_has_the_checkpoints_before_its_restart() -> None:
    ancestor, unlisted, older, restored, newer = (
        Name(9, OLD, 0), Name(8, OLD, 0), A, B, C
    )  # fmt: skip
    storage = MemoryStorage()
    for name in (ancestor, unlisted, older, newer):
        _written(storage, name, RUN)
    manifest = _written(storage, restored, RUN, ancestor, Name(7, OLD, 0))

    lineage = _descended(storage, restored, manifest, newer)

    assert lineage == Lineage(restored, frozenset({older, ancestor}), frozenset({newer}), RUN)
    assert lineage.names() == [str(ancestor), str(older), str(restored)]


@pytest.mark.parametrize("what", ["another run", "no run", "a flipped bit", "half", "a folder"])
def test_a_listed_name_without_a_manifest_is_no_proof(what: str) -> None:
    storage, listed, own = MemoryStorage(), Name(9, OLD, 0), Name(8, OLD, 0)
    for name in (listed, A, own):
        _written(storage, name, {"another run": OTHER, "no run": ""}.get(what, RUN))
        data = bytearray(storage.files[name.file(MANIFEST_FILE)])
        if what == "a flipped bit":
            data[40] ^= 1
        if what == "half":
            del data[len(data) // 2 :]
        storage.files[name.file(MANIFEST_FILE)] = bytes(data)
        if what == "a folder":
            storage.write(name.file(f"{MANIFEST_FILE}/x"), [b""])
            del storage.files[name.file(MANIFEST_FILE)]
    _written(storage, own, RUN)
    manifest = _written(storage, B, RUN, listed, own)

    assert _descended(storage, B, manifest) == Lineage(B, frozenset({own}), run=RUN)


def test_with_an_earlier_version_only_the_restored_checkpoint_may_be_deleted() -> None:
    storage, listed = MemoryStorage(), Name(9, OLD, 0)
    _written(storage, listed, ""), _written(storage, A, "")
    manifest = _written(storage, B, "", listed)

    lineage = _descended(storage, B, manifest)

    assert lineage.names() == [str(B)]
    assert len(lineage.run) == 32


def test_every_run_has_its_own_identifier() -> None:
    assert Lineage().run != Lineage().run


def test_remnants_are_deleted_unless_they_may_have_lost_their_manifest() -> None:
    lost, remnant = Name(2, OLD, 0), Name(1, OLD, 0)
    storage = _holding([A], [lost, remnant])
    storage.write(lost.file(METADATA), [b"{}"])

    prune(storage, A, 1, Lineage())

    assert storage.list() == sorted([COMPLETED, str(A), str(lost)])


def test_the_first_complete_checkpoint_writes_a_note_once() -> None:
    storage = _holding([A])

    prune(storage, A, 1, Lineage())
    assert str(A) in storage.files[COMPLETED].decode()
    storage.files[COMPLETED] = b"kept"
    prune(storage, A, 1, Lineage())

    assert storage.files[COMPLETED] == b"kept"


def test_the_manifest_is_deleted_first_and_the_folder_last() -> None:
    storage = _holding([A])
    storage.write(A.file("notes.txt"), [b"mine"])

    delete(storage, A)

    assert storage.deleted[0] == A.file(MANIFEST_FILE)
    assert storage.deleted[-1] == str(A)
    assert set(storage.files) == {A.file("notes.txt")}


def test_without_the_newest_in_the_listing_no_checkpoint_is_deleted() -> None:
    storage = _holding([B, A], [C])
    storage.write(COMPLETED, [b"x"])

    prune(storage, C, 1, Lineage())
    assert not storage.deleted

    storage.write(C.file(MANIFEST_FILE), [b"{}"])
    prune(storage, C, 1, Lineage())
    assert storage.checkpoints() == [str(C)]


def test_only_a_run_that_started_later_is_a_later_run() -> None:
    storage = _holding([Name(9, OLD, 0), A], [B])
    assert later_run(storage, A) is None

    storage.write(Name(1, LATER, 0).file("items-00000.jsonl"), [b"x"])
    assert later_run(storage, A) == Name(1, LATER, 0)


def test_a_generation_is_the_time_and_a_random_number() -> None:
    assert next_generation(_holding([]), 0x12345678 + 0.9, 0xABC) == "123456780abc"


def test_a_run_with_a_slow_clock_still_gets_a_later_generation() -> None:
    storage = _holding([], [Name(1, "6000000000ff", 0), Name(1, "70000000ffff", 0)])

    assert next_generation(storage, float(0x60000000), 0) == "700000010000"


def test_a_generation_does_not_overflow() -> None:
    storage = _holding([], [Name(1, "fffffffe0000", 0), Name(1, "ffffffff0001", 0)])

    generation = next_generation(storage, 1.8e9, 0x0002)

    assert generation == "ffffffff0002"
    assert later_run(storage, Name(5, generation, 0)) is None


def test_a_run_in_the_same_second_has_the_next_number() -> None:
    assert next_generation(_holding([Name(1, "600000000000", 0)]), float(0x60000000), 7) == (
        "600000010007"
    )
