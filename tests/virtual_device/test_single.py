"""One virtual device: its times are those of a calculation by hand."""

from __future__ import annotations

import pytest

from evenstride.testing import RankPool
from tests.virtual_device import single


def test_a_kernel_costs_what_was_set(virtual_ranks: RankPool) -> None:
    (after,) = virtual_ranks.run(single.kernels, 1)

    # 3 us; 24 elements, with those of the result, of 100 ns; 3 us at a quarter of the speed
    assert after == pytest.approx([0.003, 0.0024, 0.012], abs=1e-9)


@pytest.mark.parametrize(("queue_depth", "host_ms"), [(1024, 2.0), (2, 20.5), (1, 30.5)])
def test_the_host_runs_ahead_by_the_queue(
    virtual_ranks: RankPool, queue_depth: int, host_ms: float
) -> None:
    ((host, cursor, waited),) = virtual_ranks.run(single.ahead, 1, queue_depth)

    assert host == host_ms
    assert cursor == waited == 40.5, "the first launch takes 0.5 ms, then the device is busy"


def test_a_stream_waits_for_an_event_and_the_host_does_not(virtual_ranks: RankPool) -> None:
    (seen,) = virtual_ranks.run(single.overlapped, 1)

    assert seen == {
        "side": 30.0,
        "main before": 14.0,
        "main after": 30.0,
        "passed before the wait": 0.0,
        "elapsed": 26.0,
        "host": 30.0,
    }


def test_events_are_not_read_before_the_device_passes_them(virtual_ranks: RankPool) -> None:
    (error,) = virtual_ranks.run(single.read_too_early, 1)

    assert "must be completed" in error


def test_the_host_waits_where_it_needs_a_result(virtual_ranks: RankPool) -> None:
    (seen,) = virtual_ranks.run(single.copied, 1)

    assert seen == {"item": 5.0, "cpu": 5.0, "to the device": 5.0, "to the device later": 0.0}


def test_memory_is_counted_and_ends(virtual_ranks: RankPool) -> None:
    (seen,) = virtual_ranks.run(single.allocated, 1)

    assert "tried to allocate 901 bytes with 100 of 1000 in use" in seen.pop("error")
    assert seen == {
        "now": 100,
        "peak": 800,
        "free and total": (900, 1000),
        "fits": 900,
        "kept": 100,
    }


def test_training_computes_what_a_cpu_computes(virtual_ranks: RankPool) -> None:
    (on_device,) = virtual_ranks.run(single.trained, 1, "virtual")
    (on_cpu,) = virtual_ranks.run(single.trained, 1, "cpu")

    assert len(on_cpu) == 18
    for ours, theirs in zip(on_device, on_cpu, strict=True):
        # The order in which a kernel adds numbers up may depend on where these are in memory.
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)


def test_the_backward_pass_uses_the_streams_of_the_forward_pass(virtual_ranks: RankPool) -> None:
    ((forward, on_side, after, *gradient),) = virtual_ranks.run(single.backward, 1)

    assert (forward, on_side, after) == (9.0, 39.0, 39.0)
    assert gradient == [2.0, 2.0, 2.0]


def test_noise_is_read_without_waiting_for_the_device(virtual_ranks: RankPool) -> None:
    ((seen, values),) = virtual_ranks.run(single.read_later, 1)

    assert seen == [False, 0.0, True, 5.0]
    assert values == [2.0, 2.0]


def test_random_numbers_of_a_device_are_saved_and_drawn_again(virtual_ranks: RankPool) -> None:
    (repeats,) = virtual_ranks.run(single.random_numbers, 1)

    assert repeats.pop("drawn under another seed") is False
    assert all(repeats.values()), repeats
