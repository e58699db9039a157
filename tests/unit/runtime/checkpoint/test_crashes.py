"""After a crash at any point of a save, this checkpoint or the previous one is found."""

from __future__ import annotations

import pytest

from evenstride.runtime.checkpoint.format.manifest import parse_name
from tests.messages import check_message, lines_with
from tests.unit.runtime.checkpoint.kept import Dead, MemoryStorage, MortalStorage, Runs, Solo

# A save writes tensors, items, the index and the manifest.
WRITES_OF_A_SAVE = 4


def _dies(run: Solo) -> None:
    run.train(2)
    run.checkpoint.wait()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("after", range(WRITES_OF_A_SAVE + 1))
def test_a_run_that_is_killed_during_a_save_continues_from_the_previous_one(
    runs: Runs, after: int, half: bool
) -> None:
    storage = MemoryStorage()
    first = runs(storage, every=2)
    first.train(2)
    first.checkpoint.close()
    mortal = MortalStorage(storage.files, None, half=half)
    second = runs(mortal, every=2)
    second.restore()
    mortal.left = after

    _dies(second)

    third = runs(storage, every=2)
    restored = third.restore()
    assert restored is not None
    assert restored.step == (4 if after == WRITES_OF_A_SAVE else 2)
    alike = second if restored.step == 4 else first
    assert third.weights() == alike.weights()
    third.train(4)
    third.checkpoint.close()
    steps = [name.step for text in storage.list() if (name := parse_name(text))]
    begun = (after, half) in ((2, True), (3, False), (3, True))
    left = [4] if begun else []  # its table is there: it could have lost its manifest later
    assert sorted(steps) == sorted([*left, restored.step + 2, restored.step + 4])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("after", range(WRITES_OF_A_SAVE))
def test_a_run_that_is_killed_in_its_first_save_starts_from_scratch(
    runs: Runs, after: int, half: bool, caplog: pytest.LogCaptureFixture
) -> None:
    mortal = MortalStorage({}, None, half=half)
    first = runs(mortal, every=2)
    mortal.left = after
    _dies(first)
    caplog.clear()

    again = runs(MortalStorage(mortal.files, None))

    assert again.restore() is None
    unfinished = [name for name in mortal.list() if parse_name(name)]
    assert ("unfinished" in caplog.text) == bool(unfinished)


def test_a_writer_that_wakes_up_late_does_not_complete_its_checkpoint(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    storage = MemoryStorage()
    old = runs(storage, every=2, keep=1)
    old.train(2)
    old.checkpoint.wait()
    new = runs(storage, every=2)
    new.restore()
    new.train(2)
    new.checkpoint.close()
    before = dict(storage.files)

    caplog.clear()
    old.train(4)  # steps 4 and 6, when another run has saved 4

    old.checkpoint.wait()
    check_message(lines_with("\n".join(caplog.messages), "was not saved"))
    assert {name: storage.files.get(name) for name in before} == before
    again = runs(storage)
    restored = again.restore()
    assert restored is not None
    assert restored.step == 4
    assert again.weights() == new.weights()


def test_a_late_writer_deletes_nothing_of_a_later_run(runs: Runs) -> None:
    storage = MemoryStorage()
    late = runs(storage, every=1, keep=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: 4e9)
        new = runs(storage, every=1, keep=1)
    new.train(1)
    new.checkpoint.close()
    (name,) = storage.checkpoints()
    _, _, begun, _ = name.split("-")
    storage.files[f"step-000000001-{begun}-1/items-00000.jsonl"] = b"being written"
    before = dict(storage.files)

    # As if it had looked for later runs just before there was one.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "evenstride.runtime.checkpoint.save.checkpoint_writer.later_run", lambda *_: None
        )
        late.train(3)
        late.checkpoint.close()

    assert {name: storage.files.get(name) for name in before} == before


def test_a_killed_store_makes_no_more_writes() -> None:
    storage = MortalStorage({}, 0, half=True)

    with pytest.raises(Dead):
        storage.write("a", [b"1234"])
    with pytest.raises(Dead):
        storage.write("a", [b"1234"])
    assert storage.files == {"a": b"12"}
