"""Streaming libraries: each sample once per epoch, and a run goes on with other ranks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstride.errors import ConfigError
from evenstride.integrations.streaming_data import huggingface_shards, mosaic_shards
from evenstride.testing import RankPool
from tests.integrations import digit_streams
from tests.integrations.digit_streams import BATCH, LENGTH, alone_on, train
from tests.messages import raises_message
from tests.multiproc.training import relative_error

pytest.importorskip("sklearn")

KINDS = (
    "datasets",
    "datasets by shards",
    "webdataset",
    "webdataset by shards",
    "streaming by shards",
    "torchdata",
)


def _need(kind: str) -> None:
    library = kind.partition(" ")[0]
    try:
        importlib.import_module(library)
    except (ImportError, RuntimeError) as error:  # or something it needs does not work
        pytest.skip(f"{library} cannot be imported: {error}")


def _steps(runs: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [
        list(parts)
        for results in runs
        for parts in zip(*(t["steps"] for t in results), strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_once_and_the_gradient_exact_also_after_a_restart(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    _need(kind)
    digit_streams.write(kind, tmp_path)
    plan = {"policy": "static:5,19", "epochs": 2, "stop": 15, "workers": (0, 2)}

    first = ranks.run(train, 2, kind, tmp_path, plan, timeout_s=110)
    state = first[0]["state"]
    rest = ranks.run(train, 3, kind, tmp_path, {"policy": "adaptive", "epochs": 2, "state": state})

    assert state == first[1]["state"]
    epochs: list[list[int]] = [[], []]
    for parts in _steps([first, rest]):
        ids = [i for part in parts for i in part["ids"]]
        assert len(ids) == min(BATCH, LENGTH - len(epochs[parts[0]["epoch"]]))
        epochs[parts[0]["epoch"]] += ids
    assert [sorted(ids) for ids in epochs] == [list(range(LENGTH))] * 2
    steps = _steps([first])
    union = [[i for part in parts for i in part["ids"]] for parts in steps]
    unweighted = np.mean([alone_on([part["ids"]])[0] for part in steps[0]], axis=0)
    assert relative_error(unweighted.tolist(), steps[0][0]["gradient"]) > 0.05, "what DDP averages"
    for parts, truth in zip(steps, alone_on(union), strict=True):
        assert [len(part["ids"]) for part in parts] in ([5, 19], [2, 8])
        assert max(relative_error(part["gradient"], truth) for part in parts) <= 1e-12


def test_a_source_of_another_kind_is_refused() -> None:
    for make in (huggingface_shards, mosaic_shards):
        with raises_message(ConfigError, "list"):
            make([1, 2])


def test_a_data_set_that_is_split_by_rank_is_refused(tmp_path: Path) -> None:
    _need("datasets")
    from datasets.distributed import split_dataset_by_node

    data = digit_streams.read_json(tmp_path)

    with raises_message(ConfigError, "split_dataset_by_node"):
        huggingface_shards(split_dataset_by_node(data, rank=0, world_size=2))


def test_lengths_that_are_known_are_not_counted(tmp_path: Path) -> None:
    _need("datasets")
    data = digit_streams.read_json(tmp_path)

    assert huggingface_shards(data).lengths == (50,) * 5
    with raises_message(ConfigError, "3 lengths", "5 shards"):
        huggingface_shards(data, [50, 50, 50])
    assert huggingface_shards(data, [7] * 5).lengths == (7,) * 5
