"""What evenstride cannot train on a device is refused before the first backward pass, and alike."""

from __future__ import annotations

from evenstride.testing import RankPool
from tests.virtual_device import refused_device

REFUSED = {
    "tp": ["a model with tensor parallelism", "is a DTensor on (dp=2, tp=2)"],
    "cp": ["a model with context parallelism", "cp=2", 'policy="uniform"'],
    "ep": ["a model with expert parallelism", "1.weight has the mark allreduce=False"],
    "compiled autograd": ["under compiled autograd", "(step 0)"],
    "graph": ["while a CUDA graph is captured", "make_graphed_callables", "(step 0)"],
    "mixed": [
        "ranks 0, 2, 3 (virtual) wait in vccl and rank 1 (cpu) waits in gloo",
        "so they wait for each other for ever; use one type of device",
    ],
}


def test_each_program_is_refused_by_name_and_alike(virtual_ranks: RankPool) -> None:
    everywhere = virtual_ranks.run(refused_device.refusals, 4, list(REFUSED), timeout_s=180.0)

    assert all(answers == everywhere[0] for answers in everywhere)
    for name, facts in REFUSED.items():
        assert [fact for fact in facts if fact not in everywhere[0][name]] == [], name
