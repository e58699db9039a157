"""Caps of memory: safe under noise, exact without, and never against what has happened."""

from __future__ import annotations

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.allocation.memory import MemoryModel

GB = 10**9
sizes = st.integers(1, 300)
limits = st.integers(1, 40 * GB)
fractions = st.sampled_from([0.5, 0.8, 0.9, 0.95, 1.0])
# What happens to a worker: a size and its peak, or a size that failed (no peak).
events = st.tuples(sizes, st.none() | st.integers(0, 20 * GB), st.booleans())


def _after(happened: list[tuple[int, int | None, bool]]) -> MemoryModel:
    memory = MemoryModel()
    for samples, peak_bytes, ran in happened:
        memory = memory.saw(samples, peak_bytes) if ran else memory.failed(samples)
    return memory


@given(st.lists(events), limits, limits, fractions)
def test_a_larger_limit_never_lowers_the_cap(
    happened: list[tuple[int, int | None, bool]], one: int, other: int, fraction: float
) -> None:
    memory = _after(happened)

    low, high = (memory.cap(limit, fraction) for limit in sorted((one, other)))

    assert (low is None) == (high is None)
    assert low is None or high is None or low <= high


@given(st.lists(events), limits, fractions)
def test_a_larger_fraction_never_lowers_the_cap(
    happened: list[tuple[int, int | None, bool]], limit: int, fraction: float
) -> None:
    memory = _after(happened)

    part, whole = memory.cap(limit, fraction), memory.cap(limit, 1.0)

    assert part is None or (whole is not None and part <= whole)


@given(st.data(), st.lists(sizes, min_size=1, max_size=8, unique=True), limits, fractions)
def test_what_ran_is_allowed_and_what_failed_is_not(
    data: st.DataObject, pool: list[int], limit: int, fraction: float
) -> None:
    """Of at most 8 sizes, so that none is forgotten."""
    known = st.tuples(st.sampled_from(pool), st.integers(0, 20 * GB), st.booleans())
    happened = data.draw(st.lists(known, min_size=1))
    memory, ran, failed = MemoryModel(), set[int](), set[int]()
    for samples, peak_bytes, well in happened:
        memory = memory.saw(samples, peak_bytes) if well else memory.failed(samples)
        (ran if well else failed).add(samples)
        ran = {size for size in ran if not failed or size < min(failed)}

    cap = memory.cap(limit, fraction)

    assert cap is not None
    assert cap >= max(ran, default=1)
    assert not failed or cap < min(failed) or cap == min(failed) == 1
    assert memory.cap(None, fraction) is None or failed


@given(st.lists(st.tuples(sizes, st.integers(0, 20 * GB)), min_size=1), limits, fractions)
def test_a_cap_is_at_most_twice_the_largest_size_seen_or_takes_half_at_most(
    seen: list[tuple[int, int]], limit: int, fraction: float
) -> None:
    memory = _after([(samples, peak_bytes, True) for samples, peak_bytes in seen])

    cap = memory.cap(limit, fraction)

    assert cap is not None
    line = memory.line()
    assert line is not None
    as_if_all_per_sample = cap * line.top_bytes / line.top
    assert cap <= 2 * line.top or as_if_all_per_sample <= 0.5 * fraction * limit


@given(st.lists(st.tuples(sizes, st.integers(0, 20 * GB)), min_size=1))
def test_the_line_is_above_all_peaks_that_are_kept_and_no_higher_than_needed(
    seen: list[tuple[int, int]],
) -> None:
    memory = _after([(samples, peak_bytes, True) for samples, peak_bytes in seen])
    line = memory.line()
    highest = {size: max(b for s, b in seen if s == size) for size, _ in seen}

    assert line is not None
    slack = [line.at(size) - peak_bytes for size, peak_bytes in memory.peaks]
    assert min(slack) >= -1e-3
    assert min(slack) <= 1.001  # in whole bytes
    assert line.fixed_bytes >= -1e-3 * line.top
    assert line.rise_bytes >= 0
    assert len(memory.peaks) <= 8
    assert {memory.peaks[0][0], memory.peaks[-1][0]} == {min(highest), max(highest)}


extremes = st.sampled_from([0.0, 1.0])  # of the noise: these tilt a line most
linear = st.tuples(st.integers(0, 10 * GB), st.integers(1, GB // 10))


@given(linear, st.lists(sizes, min_size=2, unique=True), limits, fractions)
def test_without_noise_the_cap_is_exact_as_far_as_the_line_is_believed(
    truth: tuple[int, int], seen: list[int], limit: int, fraction: float
) -> None:
    fixed_bytes, per_sample_bytes = truth
    memory = _after([(size, fixed_bytes + per_sample_bytes * size, True) for size in seen])
    top, believed = max(seen), max(seen) + (max(seen) - min(seen)) // 2
    exact = (int(fraction * limit) - fixed_bytes) // per_sample_bytes

    cap = memory.cap(limit, fraction)

    assert cap is not None
    if exact <= believed:
        assert cap == max(exact, top)
    else:
        assert believed <= cap <= exact


@given(linear, sizes, st.integers(2, 50), st.integers(0, 10**5), st.floats(0, 0.99))
def test_without_noise_steps_lead_to_the_exact_cap(
    truth: tuple[int, int], low: int, span: int, more: int, rest: float
) -> None:
    fixed_bytes, per_sample_bytes = truth
    exact = low + span + more
    limit = fixed_bytes + per_sample_bytes * exact + int(rest * per_sample_bytes)
    memory = MemoryModel()

    samples, steps = [low, low + span], 0
    while samples:
        for size in samples:
            memory = memory.saw(size, fixed_bytes + per_sample_bytes * size)
        cap = memory.cap(limit, 1.0)
        samples = [cap] if cap is not None and cap > memory.ran else []
        steps += 1

    assert memory.ran == exact
    # Growth is by half the span at least: even from the narrowest span it takes few steps.
    assert steps <= 60


@given(
    linear,
    st.lists(st.tuples(st.floats(0, 1), extremes | st.floats(0, 1)), min_size=1, max_size=30),
    st.sampled_from([(0.0, 0.1), (0.0, 0.2), (0.05, 0.05)]),
    st.integers(1, 100),
    limits,
)
def test_under_noise_no_step_that_a_cap_allows_takes_more_than_the_limit(
    truth: tuple[int, int],
    steps: list[tuple[float, float]],
    noise: tuple[float, float],
    first: int,
    more_bytes: int,
) -> None:
    """Upwards by 20 %, or by 5 % both ways: what 0.9 of the limit leaves room for."""
    fixed_bytes, per_sample_bytes = truth
    limit = fixed_bytes + per_sample_bytes * first + more_bytes
    memory, samples = MemoryModel(), first

    for place, chance in steps:
        true_bytes = fixed_bytes + per_sample_bytes * samples
        assert true_bytes <= limit, (memory, samples)
        low, high = noise
        memory = memory.saw(samples, ceil(true_bytes * (1 - low + (low + high) * chance)))
        cap = memory.cap(limit, 0.9)
        assert cap is not None
        assert fixed_bytes + per_sample_bytes * cap <= limit, (memory, cap)
        # Often the whole cap, to go as far as it lets us.
        samples = cap if place > 0.5 else max(1, round(2 * place * cap))


@given(
    st.integers(1, 100),
    st.integers(1, 100),
    st.floats(0, 1),
    st.sampled_from([(0.0, 0.2), (0.05, 0.05)]),
    st.floats(1.0, 2.0),
)
def test_the_worst_noise_of_two_sizes_lets_no_cap_take_more_than_the_limit(
    low: int, span: int, fixed: float, noise: tuple[float, float], room: float
) -> None:
    """The lower one too high by as much as may be, so that the line all but does not rise."""
    top, (under, over) = low + span, noise

    def true_bytes(samples: int) -> float:
        return 10 * GB * (fixed + (1 - fixed) * samples / top)

    high_bytes = ceil(true_bytes(top) * (1 - under))
    low_bytes = min(ceil(true_bytes(low) * (1 + over)), high_bytes - 1)
    memory = MemoryModel().saw(top, high_bytes).saw(low, low_bytes)
    limit = ceil(true_bytes(top) * room)

    cap = memory.cap(limit, 0.9)

    assert cap is not None
    assert true_bytes(cap) <= limit + 1
