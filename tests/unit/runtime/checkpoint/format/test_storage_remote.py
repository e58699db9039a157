"""A failing write to an object store, of any kind, costs at most that checkpoint."""

from __future__ import annotations

import pytest

from evenstride.runtime.checkpoint.format.manifest import parse_name
from evenstride.runtime.checkpoint.format.retention import COMPLETED
from tests.messages import check_message, lines_with, raises_message
from tests.unit.runtime.checkpoint.kept import Runs
from tests.unit.runtime.checkpoint.object_store import ObjectStore

pytest.importorskip("fsspec")

# The second save writes these, after the probe, the first save, and the note that it is complete.
FIRST, LAST = 6, 9


def _steps(store: ObjectStore) -> list[int]:
    folders = {key.split("/")[2] for key in store.objects if key.endswith("/manifest.json")}
    return sorted(name.step for text in folders if (name := parse_name(text)))


def _url(store: ObjectStore) -> str:
    from tests.unit.runtime.checkpoint import evs3

    evs3.register()
    return f"evs3://{store.address}/bucket/run"


@pytest.mark.parametrize("kind", ["503", "reset", "lost"])
@pytest.mark.parametrize("at", range(FIRST, LAST + 1))
def test_a_write_that_fails_once_is_retried(runs: Runs, kind: str, at: int) -> None:
    with ObjectStore(lambda n, m, _: kind if m == "PUT" and n == at else None) as store:
        run = runs(_url(store), every=2)
        run.train(4)
        run.checkpoint.close()

        assert _steps(store) == [2, 4]
        assert store.counts["PUT"] == LAST + 2, "one more than without"
        again = runs(_url(store))
        restored = again.restore()
        assert restored is not None
        assert restored.step == 4
        assert again.weights() == run.weights()


@pytest.mark.parametrize("kind", ["503", "reset", "lost"])
@pytest.mark.parametrize("at", range(FIRST, LAST + 1))
def test_a_store_that_goes_on_failing_costs_one_checkpoint(runs: Runs, kind: str, at: int) -> None:
    with ObjectStore() as store:
        run = runs(_url(store), every=2)
        run.train(2)
        run.checkpoint.wait()
        store.fault = lambda n, m, _: kind if m == "PUT" and n >= at else None
        run.train(2)
        run.checkpoint.wait()
        assert run.checkpoint.report()["failed"] == 1
        store.fault = lambda *_: None

        again = runs(_url(store), every=2)
        restored = again.restore()
        # A manifest whose response was lost exists, and counts.
        complete = kind == "lost" and at == LAST
        assert restored is not None
        assert restored.step == (4 if complete else 2)
        again.train(4)
        again.checkpoint.close()

        left = {key.split("/")[2] for key in store.objects} - {COMPLETED}
        # Without a manifest, it may also be one that has lost it, which must not be deleted.
        kept = at == LAST - (kind == "lost")
        assert len(left) == 2 + kept


def test_a_slow_store_does_not_block_training(runs: Runs) -> None:
    with ObjectStore(
        lambda n, m, _: "held" if m == "PUT" and n > 0 else None  # but the probe
    ) as store:
        run = runs(_url(store), every=4)
        run.train(7)

        assert not _steps(store)
        store.let_go()
        run.checkpoint.close()
        assert _steps(store) == [4]


@pytest.mark.parametrize("kind", ["503", "reset"])
def test_a_store_that_cannot_be_read_is_not_an_empty_one(runs: Runs, kind: str) -> None:
    with ObjectStore() as store:
        run = runs(_url(store), every=2)
        run.train(2)
        run.checkpoint.close()
        before = dict(store.objects)
        again = runs(_url(store))
        store.fault = lambda _n, m, _: kind if m == "GET" else None

        with raises_message(Exception):
            again.restore()

        assert store.objects == before


@pytest.mark.parametrize("kind", ["503", "reset"])
def test_a_store_that_cannot_delete_keeps_more(
    runs: Runs, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ObjectStore(lambda _n, m, _: kind if m == "DELETE" else None) as store:
        run = runs(_url(store), every=1, keep=1)
        run.train(3)
        run.checkpoint.close()

        assert _steps(store) == [1, 2, 3]
        check_message(lines_with("\n".join(caplog.messages), "is saved, but"))
