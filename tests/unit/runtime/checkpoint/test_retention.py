"""Which attempts go once a newer one is in place, and in which order their files do."""

from __future__ import annotations

from evenstride.runtime.checkpoint.manifest import MANIFEST, Name, items_file, tensors_file
from evenstride.runtime.checkpoint.retention import (
    attempts,
    delete,
    later_run,
    next_generation,
    prune,
    to_delete,
)
from tests.unit.runtime.checkpoint.kept import MemoryStorage

OLD, NOW, LATER = "100000000000", "200000000000", "300000000000"
A, B, C, D = (Name(step, NOW, 0) for step in (1, 2, 3, 4))


class Noting(MemoryStorage):
    """A store that notes what is deleted, in order."""

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
        storage.write(name.file(MANIFEST), [b"{}"])
    return storage


def test_attempts_come_newest_first_those_of_a_later_run_before_all() -> None:
    late, old = Name(1, LATER, 0), Name(9, OLD, 3)
    storage = _holding([A, late, B], [old, C])
    storage.write("notes.txt", [b"x"])

    assert attempts(storage) == ([late, B, A], [C, old])


def test_as_many_stay_as_are_kept_with_the_newest() -> None:
    assert to_delete([D, C, B, A], [], newest=D, keep=1, damaged=()) == [C, B, A]
    assert to_delete([D, C, B, A], [], newest=D, keep=3, damaged=()) == [A]


def test_the_damaged_go_and_do_not_count_among_those_kept() -> None:
    assert to_delete([D, C, B, A], [], newest=D, keep=2, damaged={C}) == [A, C]


def test_what_comes_after_the_newest_is_not_touched_and_what_never_ended_goes() -> None:
    sound, late, begun = (Name(step, LATER, 0) for step in (3, 2, 1))
    complete, old = [sound, late, C, B, A], Name(3, OLD, 1)

    found = to_delete(complete, [begun, old], newest=C, keep=2, damaged={late})

    assert found == [A, old]


def test_the_manifest_goes_first_the_folder_last_and_others_files_stay() -> None:
    storage = _holding([A])
    storage.write(A.file("notes.txt"), [b"mine"])

    delete(storage, A)

    assert storage.deleted[0] == A.file(MANIFEST)
    assert storage.deleted[-1] == str(A)
    assert set(storage.files) == {A.file("notes.txt")}


def test_nothing_goes_while_the_store_does_not_list_the_newest() -> None:
    storage = _holding([B, A], [C])

    prune(storage, C, 1, ())
    assert not storage.deleted

    storage.write(C.file(MANIFEST), [b"{}"])
    prune(storage, C, 1, ())
    assert storage.checkpoints() == [str(C)]


def test_only_a_run_that_began_later_is_a_later_one() -> None:
    storage = _holding([Name(9, OLD, 0), A], [B])
    assert later_run(storage, A) is None

    storage.write(Name(1, LATER, 0).file("items-00000.jsonl"), [b"x"])
    assert later_run(storage, A) == Name(1, LATER, 0)


def test_a_generation_is_the_time_and_what_was_drawn() -> None:
    assert next_generation(_holding([]), 0x12345678 + 0.9, 0xABC) == "123456780abc"


def test_a_run_whose_clock_is_behind_begins_later_than_those_before_all_the_same() -> None:
    storage = _holding([], [Name(1, "6000000000ff", 0), Name(1, "70000000ffff", 0)])

    assert next_generation(storage, float(0x60000000), 0) == "700000010000"


def test_a_generation_never_begins_anew_at_the_largest_number() -> None:
    storage = _holding([], [Name(1, "fffffffe0000", 0), Name(1, "ffffffff0001", 0)])

    generation = next_generation(storage, 1.8e9, 0x0002)

    assert generation == "ffffffff0002"
    assert later_run(storage, Name(5, generation, 0)) is None


def test_a_run_that_begins_in_the_same_second_has_the_next_number() -> None:
    assert next_generation(_holding([Name(1, "600000000000", 0)]), float(0x60000000), 7) == (
        "600000010007"
    )
