"""Plain batch norm and steps in which a rank gets one sample: said at the beginning."""

from __future__ import annotations

import pytest
from torch import nn

from evenstride.core.sampling.draw import Draw
from evenstride.runtime.batch_norm.norm_layers import PlainNorms
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits, RankLayout, Spans
from tests.messages import check_message
from tests.unit.runtime.coordination.test_agreement import heard

EVEN, MOVING, MOVING_FROM_2 = ((8, 8), (8, 8)), ((1, 15), (1, 15)), ((2, 14), (2, 14))
FULL = Draw(step=0, window=16, share=8, samples=8, first=True, last=True)

# Spans, samples of the last step; and parts of the warning, if any.
AHEAD: dict[str, tuple[Spans, int, bool]] = {
    "fixed, no tail": (EVEN, 0, False),
    "fixed, a tail of two each": (EVEN, 4, False),
    "fixed, a tail of one for somebody": (EVEN, 3, True),
    "fixed and uneven": (((2, 2), (14, 14)), 8, True),
    "fixed, of one, which its own step refuses": (((1, 1), (15, 15)), 0, False),
    "moving": (MOVING, 0, True),
    "moving, at least two": (MOVING_FROM_2, 0, False),
    "moving, at least two, with a tail": (MOVING_FROM_2, 12, True),
    "moving, at least four, with a tail": (((4, 12), (4, 12)), 8, False),
    "moving, and a tail too short": (((4, 12), (4, 12)), 3, True),
    "one process": ((), 1, False),
}


@pytest.mark.parametrize("name", AHEAD)
def test_a_rank_that_gets_one_sample_is_said_at_the_first_batch_and_once(name: str) -> None:
    spans, tail, expected = AHEAD[name]
    norms = PlainNorms(2, MicroBatchLimits(layout=RankLayout(spans, tail=tail)))
    norms.watch(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)))

    with heard() as said:
        norms.begin(FULL)
        norms.begin(FULL._replace(step=1))

    assert len(said) == expected
    check_message(said)
    assert all("min_share=2" in text and "drop_last=True" in text for text in said)


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(2), nn.BatchNorm1d(2).eval(), nn.LayerNorm(2)])
def test_layers_that_can_do_with_one_sample_are_left_in_peace(layer: nn.Module) -> None:
    norms = PlainNorms(2, MicroBatchLimits(layout=RankLayout(MOVING, tail=1)))
    norms.watch(layer)

    with heard() as said:
        norms.begin(FULL)

    assert said == []
