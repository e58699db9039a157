"""Mixed precision: ranks skip the same steps, and what they train is exact to its rounding.

An overflow is in the reduced gradient, which is the same bytes on every rank under DDP, whatever
device each computed its own part on. Under FSDP2 a rank sees its shard only, and torch itself
takes the maximum of what all ranks found. (PyTorch, ``found_inf_reduce_handler``.) So nothing has
to be added; these tests fail where that does not hold.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from evenstride.testing import RankPool
from tests.multiproc.amp import SCALE, Run, Step, alone, train
from tests.multiproc.sharded import SHARDS_ON_CPU
from tests.multiproc.training import relative_error

# Half the distance of two neighbouring numbers, as a part of them; and how many such errors are
# in a gradient that went through four layers and back.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
ERRORS = 8
FLOAT64 = 1e-12


def trained(ranks: RankPool, run: Run) -> list[Step]:
    """Return the first rank's steps, after a look at whether all ranks agree on them."""
    if run.engine == "fsdp" and not SHARDS_ON_CPU:
        pytest.skip("FSDP2 of torch 2.6 needs a card")
    count = math.prod(run.mesh) if run.engine == "fsdp" else run.policy.count(",") + 1
    first, *others = ranks.run(train, count, run)
    for steps in others:
        assert [s.weights for s in steps] == [s.weights for s in first], "bit for bit"
        assert [s.scale for s in steps] == [s.scale for s in first]
        assert [s.position for s in steps] == [s.position for s in first]
    assert len(first) == run.steps
    assert not any(s.early for s in first), "no position between backward pass and update"
    return list(first)


def check_exact(run: Run, steps: list[Step]) -> None:
    """Check every step's gradient, and the weights in the end, against those of one process."""
    expected = alone(run)
    for number, (seen, truth) in enumerate(zip(steps, expected, strict=True)):
        if run.overflow is None or number != run.overflow[1]:
            error = relative_error(seen.gradient, truth.gradient)
            assert error <= ERRORS * ROUNDING[run.dtype]
    assert relative_error(steps[-1].weights, expected[-1].weights) <= ROUNDING[run.dtype]


OVERFLOWS = {
    "the slower of two": Run(overflow=(0, 1)),
    "the faster of two": Run(overflow=(1, 1)),
    "the first step": Run(overflow=(1, 0)),
    "with clipping": Run(overflow=(0, 1), clip=1e-2),
    "in micro-batches": Run(overflow=(0, 1), micro=4),
    "with a share of 0": Run("static:0,3,13", overflow=(1, 2), poison=0),
    "inside a fused optimizer": Run(overflow=(0, 1), optimizer="fused"),
    "under a sharded optimizer": Run(overflow=(0, 1), optimizer="zero"),
    "sharded": Run(engine="fsdp", overflow=(0, 1)),
    "sharded, with clipping": Run(engine="fsdp", overflow=(1, 1), clip=1e-2),
    "sharded, in micro-batches": Run(engine="fsdp", overflow=(1, 1), micro=4),
    "sharded, in one shard": Run(engine="fsdp", overflow=(0, 1), spot=True),
    "sharded, in the other shard": Run(engine="fsdp", overflow=(1, 1), spot=True, clip=1e-2),
    "sharded, fused": Run(engine="fsdp", overflow=(1, 1), spot=True, optimizer="fused"),
    "islands, in one shard": Run(
        "static:4,12", engine="fsdp", mesh=(2, 2), overflow=(0, 1), spot=True
    ),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: RankPool, name: str) -> None:
    run = OVERFLOWS[name]
    assert run.overflow is not None

    steps = trained(ranks, run)

    skipped = run.overflow[1]
    assert [s.scale for s in steps] == [
        SCALE if number < skipped else SCALE / 2 for number in range(run.steps)
    ]
    assert [s.position for s in steps] == [16 * (1 + number) for number in range(run.steps)]
    for number in range(1, run.steps):
        unchanged = steps[number].weights == steps[number - 1].weights
        assert unchanged == (number == skipped)
    assert all(map(math.isfinite, steps[-1].weights))
    check_exact(run, steps)


@pytest.mark.parametrize("name", [name for name, run in OVERFLOWS.items() if run.spot])
def test_ranks_that_did_not_agree_would_be_noticed(ranks: RankPool, name: str) -> None:
    run = replace(OVERFLOWS[name], agreed=False)

    with pytest.raises(AssertionError):
        trained(ranks, run)


EXACT = {
    "half precision": Run(),
    "bfloat16": Run(dtype="bfloat16"),
    "half precision, clipped": Run(clip=1e-2),
    "half precision in micro-batches": Run(micro=4),
    "bfloat16 in micro-batches": Run(dtype="bfloat16", micro=4),
    "a share of 0 whose loss is infinite": Run("static:0,3,13", poison=0),
    "bfloat16 with such a share": Run("static:0,3,13", dtype="bfloat16", poison=0),
    "sharded": Run(engine="fsdp"),
    "sharded in bfloat16": Run(engine="fsdp", dtype="bfloat16"),
    "sharded with a share of 0": Run("static:0,3,13", engine="fsdp", mesh=(3,), poison=0),
}


@pytest.mark.parametrize("name", EXACT)
def test_without_an_overflow_the_gradient_is_exact_to_rounding(ranks: RankPool, name: str) -> None:
    run = EXACT[name]

    steps = trained(ranks, run)

    scale = SCALE if run.dtype == "float16" else 1.0
    assert [s.scale for s in steps] == [scale] * run.steps, "nothing was skipped"
    check_exact(run, steps)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_broken_weight_is_noticed(ranks: RankPool, dtype: str, engine: str) -> None:
    run = Run(dtype=dtype, engine=engine, broken=True)

    with pytest.raises(AssertionError):
        check_exact(run, trained(ranks, run))


@pytest.mark.parametrize("optimizer", ["zero", "zero-view"])
@pytest.mark.parametrize("micro", [None, 4])
def test_a_sharded_optimizer_trains_the_weights_of_one_process(
    ranks: RankPool, optimizer: str, micro: int | None
) -> None:
    run = Run(dtype="float64", optimizer=optimizer, micro=micro, steps=6)

    steps = trained(ranks, run)
    broken = ranks.run(train, 2, replace(run, broken=True))[0]

    assert [s.position for s in steps] == [16 * (1 + number) for number in range(6)]
    expected = alone(run)
    for seen, truth in zip(steps, expected, strict=True):
        assert relative_error(seen.weights, truth.weights) <= FLOAT64
    assert relative_error(broken[-1].weights, expected[-1].weights) > 1e-4
