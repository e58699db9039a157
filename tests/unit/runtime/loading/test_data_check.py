"""How a rank looks at its data: few samples, little time, and nothing changed."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import evenstride
from evenstride.errors import RanksDisagree
from evenstride.runtime.loading.loader_agreement import judge_data, look
from evenstride.testing import FakeClock
from tests.messages import raises_message
from tests.unit.runtime.solo import numbered


class Slow(Dataset[int]):
    """A data set of 1,000 samples that each take a while; its copies have the same clock."""

    clock: FakeClock

    def __init__(self, takes_s: float) -> None:
        self.takes_s, self.table = takes_s, list(range(20_000))

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        self.clock.now_s += self.takes_s
        return self.table[index]


@pytest.mark.parametrize(("takes_s", "seen"), [(0.0, 8), (0.01, 3), (0.05, 1), (0.2, 0)])
def test_looking_stops_when_its_time_is_up(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, seen: int
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(Slow, "clock", clock, raising=False)
    data = Slow(takes_s)
    monkeypatch.setattr("evenstride.runtime.loading.loader_agreement.time.perf_counter", clock)

    assert len(look(data, seed=0, processes=0)["samples"]) == seen


class Counting(Dataset[Any]):
    """A data set that counts, caches and draws numbers of its own."""

    def __init__(self) -> None:
        self.count, self.cache = 0, {}  # type: ignore[var-annotated]
        self.generator, self.noise = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        self.cache[index] = self.noise.random()
        return torch.rand(3, generator=self.generator), self.cache[index]


def test_a_data_set_is_as_it_was_after_looking() -> None:
    data = Counting()
    drawn = torch.rand(3, generator=torch.Generator().manual_seed(1))

    shown = look(ConcatDataset([data, numbered(5)]), seed=0, processes=0)

    assert shown["samples"], "those of the other part"
    assert (data.count, data.cache) == (0, {})
    assert torch.equal(data[0][0], drawn)


class Locked(Counting):
    """A data set that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return index


def test_data_that_cannot_be_copied_is_read_only_if_this_process_loads_it() -> None:
    here, there = Locked(), Locked()

    assert look(here, seed=0, processes=0)["samples"]
    assert look(there, seed=0, processes=2) == {}
    assert (here.count > 0, there.count) == (True, 0)


def test_large_tables_are_shared_with_the_copy() -> None:
    class Table(Dataset[Any]):
        def __init__(self) -> None:
            self.names = [f"{n}.jpg" for n in range(200_000)]

        def __len__(self) -> int:
            return len(self.names)

        def __getitem__(self, index: int) -> Any:
            return self.names is names, self.names[index]

    data = Table()
    names = data.names

    seen = look(data, seed=0, processes=2)["samples"]

    assert len(seen) == 8
    assert seen["0"]["exact"] == look([(True, "0.jpg")], 0, 0)["samples"]["0"]["exact"]


def test_of_shards_the_first_samples_are_looked_at() -> None:
    opened = []

    def read(shard: int, skip: int) -> Any:
        opened.append((shard, skip))
        return iter([shard] * 5)

    shown = look(evenstride.Shards([5, 0, 5], read), seed=0, processes=0)

    assert sorted(shown["samples"]) == ["0", "5"]
    assert {skip for _, skip in opened} == {0}


def test_the_way_a_data_set_was_cut_is_seen_through_wrappers() -> None:
    class Wrapper(Dataset[Any]):
        def __init__(self, dataset: Any) -> None:
            self.dataset = dataset

        def __len__(self) -> int:
            return len(self.dataset)

        def __getitem__(self, index: int) -> Any:
            return self.dataset[index]

    split, part = (Subset(numbered(9), order) for order in ([3, 1, 2], [0, 3, 6]))

    assert look(Wrapper(split), seed=0, processes=0)["made"] == "split"
    assert look(part, seed=0, processes=0)["made"] == "part"
    assert look(Wrapper(numbered(9)), seed=0, processes=0)["made"] == ""


def test_only_what_all_ranks_show_is_compared() -> None:
    one, other = (look(Subset(numbered(40), order), 0, 0) for order in (range(20), range(20, 40)))

    judge_data([one, {}], "a loader")
    judge_data([one, {"samples": {}, "made": ""}], "a loader")
    with raises_message(RanksDisagree, "rank 2", "rank 0"):
        judge_data([one, one, other], "a loader")
