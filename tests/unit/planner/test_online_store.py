"""What an online search takes from the store: it measures only what it must confirm."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from evenstride.planner.online_forecast import Configuration, Probe, TrainingJob, carried_over
from evenstride.planner.online_policy import OnlineStanding, best_known, choices, decide
from evenstride.planner.online_store import (
    FOLDER,
    SearchStore,
    confirms,
    knowledge_of,
    probes_in,
    search_profile,
    worker_types,
)
from evenstride.planner.workload.from_trace import Facts
from evenstride.planner.workload.model_store import keep, read_store
from evenstride.planner.workload.workload_profile import Model, Noise, WorkloadProfile
from tests.unit.planner.searching import Truth
from tests.unit.planner.workload.jobs import job, stored, trained

BATCHES, WORKERS = (64, 256, 1024), (1, 2, 4)
POSSIBLE = choices(WORKERS, BATCHES)
TYPES = worker_types("box", 4, ())
TRUTH = Truth((1e-4, 1e-4, 2e-4, 2e-4))
NOISE = Noise(scale=5000.0, low=4500.0, high=5500.0, settled=True)
FACTS = Facts("0.1.0", "2.13.0", 64, 1, 1000, 4e5, "abc", 60_000, "", 1.7e9)
TRAINING = TrainingJob(60_000, 30.0, 64, 4e5, noise=NOISE, batches=3)
SEEN = tuple(replace(TRUTH.probe(c), noise=NOISE) for c in (min(POSSIBLE), max(POSSIBLE)))


def measured(script: str = "train.py", facts: Facts = FACTS) -> WorkloadProfile:
    return search_profile(facts, SEEN, TYPES, script, 64)


def kept(folder: Path, *searches: WorkloadProfile) -> SearchStore:
    for one in searches:
        keep(one, folder / FOLDER)
    store = read_store(folder / FOLDER, "0.1.0", "2.13.0")
    assert store.skipped == ()
    return SearchStore(TYPES, store.models)


def other(**changes: object) -> Facts:
    return replace(FACTS, **changes)  # type: ignore[arg-type]


def test_a_stored_search_has_its_probes_on_the_same_workers_only(tmp_path: Path) -> None:
    (model,) = kept(tmp_path, measured()).searches

    found = {one.choice: one for one in probes_in(model.profile, TYPES)}

    assert set(found) == {one.choice for one in SEEN}
    for one in SEEN:
        assert found[one.choice].step_s == one.step_s
        assert found[one.choice].communication_s == pytest.approx(one.communication_s)
    assert probes_in(model.profile, worker_types("other box", 4, ())) == ()
    assert probes_in(model.profile, worker_types("box", 4, (1.0, 0.5, 0.5, 0.5))) == ()


def test_a_later_search_adds_its_configurations(tmp_path: Path) -> None:
    between = replace(TRUTH.probe(Configuration(2, 256)), noise=NOISE)
    (model,) = kept(
        tmp_path, measured(), search_profile(FACTS, [between], TYPES, "train.py", 64)
    ).searches

    found = {one.choice for one in probes_in(model.profile, TYPES)}

    assert found == {between.choice, *(one.choice for one in SEEN)}


def test_a_search_that_stays_at_once_keeps_what_the_earlier_one_knew(tmp_path: Path) -> None:
    unsettled = Noise(scale=4000.0, low=3900.0, high=4100.0, settled=False)
    confirming = replace(TRUTH.probe(max(POSSIBLE)), noise=unsettled)
    (before,) = kept(tmp_path, measured()).searches

    store = kept(tmp_path, search_profile(FACTS, [confirming], TYPES, "train.py", 64))

    known = knowledge_of(measured(), 30.0, BATCHES, store)
    assert known.noise == NOISE and known.settled
    (after,) = store.searches
    sizes = [
        [{point.samples for point in one.points} for one in model.profile.devices]
        for model in (before, after)
    ]
    assert sizes[0] == sizes[1]
    assert 64 in sizes[1][0], "of the first worker alone, which only the earlier search measured"


def test_the_forecast_before_the_first_step_is_that_of_the_earlier_search(tmp_path: Path) -> None:
    known = knowledge_of(measured(), 30.0, BATCHES, kept(tmp_path, measured()))

    (best, *_) = best_known(TRAINING, POSSIBLE, known.probes)

    assert known.noise == NOISE and known.noise_is_own and known.settled
    first = decide(TRAINING, POSSIBLE, SEEN, OnlineStanding(max(POSSIBLE), {}, visits=2))
    assert best.choice == first.foreseen[0].choice
    assert best.time_s.value == pytest.approx(first.foreseen[0].time_s.value, rel=0.05)
    assert not best.measured, "it was measured in another search"


@pytest.mark.parametrize("slower", [1.0, 1.2])
def test_one_measurement_confirms_the_stored_model_of_the_same_job(
    tmp_path: Path, slower: float
) -> None:
    known = knowledge_of(measured(), 30.0, BATCHES, kept(tmp_path, measured()))
    (best, *_) = best_known(TRAINING, POSSIBLE, known.probes)
    here = replace(TRUTH, beside=slower).probe(best.choice)

    carried = carried_over(TRAINING, known.probes, [here], known.doubt)
    decision = decide(TRAINING, POSSIBLE, [*carried, here], OnlineStanding(here.choice, {}))

    assert known.doubt is None
    assert [one.doubt for one in carried] == pytest.approx([log(slower)] * len(carried), abs=0.02)
    assert decision.to is None
    by = {one.choice: one.step_s.value for one in decision.foreseen}
    for choice in POSSIBLE:
        assert by[choice] == pytest.approx(slower * TRUTH.step_s(choice), rel=0.1)
    # Without the store, it looks at the other extreme first.
    alone = decide(TRAINING, POSSIBLE, [here], OnlineStanding(here.choice, {}))
    assert best.choice == max(POSSIBLE) or alone.to == max(POSSIBLE)


def test_the_stored_lines_stay_when_the_configuration_that_has_them_is_measured(
    tmp_path: Path,
) -> None:
    known = knowledge_of(measured(), 30.0, BATCHES, kept(tmp_path, measured()))
    far, between = max(POSSIBLE), Configuration(4, 256)
    # Balanced workers have one size each, which shows no line.
    slower = Truth(tuple(1.1 * each for each in TRUTH.per_sample_s))
    probe = slower.probe(far)
    here = replace(probe, points=tuple(own[:1] for own in probe.points))

    carried = carried_over(TRAINING, known.probes, [here], known.doubt)

    assert known.probes[0].choice == far, "the one with all points"
    sizes = [
        [sorted(p.samples for one in probes if n < len(one.points) for p in one.points[n])]
        for probes in (known.probes, carried)
        for n in range(4)
    ]
    assert sizes[:4] == sizes[4:], "each point once"
    decision = decide(TRAINING, POSSIBLE, [*carried, here], OnlineStanding(far, {}))
    (found,) = (one.step_s for one in decision.foreseen if one.choice == between)
    assert found.value == pytest.approx(slower.step_s(between), rel=0.05)


def test_a_confirmed_model_ends_the_search_where_a_rival_is_close(tmp_path: Path) -> None:
    known = knowledge_of(measured(), 30.0, BATCHES, kept(tmp_path, measured()))
    (best, *_) = best_known(TRAINING, POSSIBLE, known.probes)
    close = replace(TRUTH, beside=1.08).probe(best.choice)
    apart = replace(TRUTH, beside=1.2).probe(best.choice)
    rival = TRUTH.probe(min(POSSIBLE))

    def confirmed(*probes: Probe) -> bool:
        return confirms(TRAINING, POSSIBLE, known, probes)

    assert confirmed(close) and not confirmed(apart) and not confirmed(rival)
    assert confirmed(replace(apart, drift=0.2)), "as far as the measurement itself may be off"
    assert not confirmed(rival, close), "it searches already"
    assert not confirms(TRAINING, POSSIBLE, replace(known, doubt=0.2), [close])
    here = OnlineStanding(rival.choice, {})
    assert decide(TRAINING, POSSIBLE, [rival], here).to is not None
    stays = decide(TRAINING, POSSIBLE, [rival], replace(here, confirmed=True))
    assert stays.to is None and "stored model" in stays.reason


def test_a_model_that_misses_what_is_measured_is_not_trusted(tmp_path: Path) -> None:
    known = knowledge_of(measured(), 30.0, BATCHES, kept(tmp_path, measured()))
    (best, second, *_) = best_known(TRAINING, POSSIBLE, known.probes)
    here = replace(TRUTH, beside=2.0).probe(best.choice)

    carried = carried_over(TRAINING, known.probes, [here], known.doubt)
    decision = decide(TRAINING, POSSIBLE, [*carried, here], OnlineStanding(here.choice, {}))

    assert decision.probe and decision.to == second.choice


def test_a_similar_job_gives_the_ratios_of_steps_with_its_error(tmp_path: Path) -> None:
    similar = search_profile(other(digest="abd", parameters=900), [], TYPES, "train.py", 64)
    known = knowledge_of(similar, None, BATCHES, kept(tmp_path, measured()))
    here = replace(TRUTH, beside=3.0).probe(min(POSSIBLE))

    carried = carried_over(TRAINING, known.probes, [here], known.doubt)

    assert [part.kind for part in known.parts] == ["similar"]
    assert {one.doubt for one in carried} == {0.2}
    assert [one.choice for one in carried] == [max(POSSIBLE)]
    assert carried[0].step_s == pytest.approx(3 * TRUTH.step_s(max(POSSIBLE)))


def test_the_noise_of_a_similar_job_counts_until_the_own_is_measured(tmp_path: Path) -> None:
    similar = search_profile(other(digest="abd", parameters=900), [], TYPES, "train.py", 64)
    known = knowledge_of(similar, 30.0, BATCHES, kept(tmp_path, measured()))
    own = replace(SEEN[0], noise=Noise(scale=100.0, low=1.0, high=1000.0, settled=False))

    assert known.noise_with([]) == NOISE and not known.settled
    assert known.noise_with([own]) == own.noise
    same = knowledge_of(measured(), 30.0, BATCHES, kept(tmp_path, measured()))
    assert same.noise_with([own]) == NOISE


def test_stored_trainings_show_the_epochs_of_the_batches_between_them() -> None:
    model = Model(parameters=1000, gradient_bytes=4e5, digest="abc")
    runs = job(model=model, samples=60_000, trainings=trained({64: 10.0, 1024: 5.0}))
    store = SearchStore(TYPES, (), tuple(stored(runs)))

    found = knowledge_of(measured(), 30.0, BATCHES, store)

    assert found.fitted is not None and found.settled
    epochs = [found.fitted.at(batch) for batch in (64, 1024)]
    assert [one and one.value for one in epochs] == [pytest.approx(30.0), pytest.approx(15.0)]
    assert "epochs by batch" in found.parts[0].what
    assert knowledge_of(measured(), 30.0, (64, 4096), store).fitted is None
    assert knowledge_of(measured(), None, BATCHES, store).fitted is None


def test_another_job_is_not_used(tmp_path: Path) -> None:
    unlike = search_profile(other(digest="x", parameters=5), [], TYPES, "other.py", 64)

    found = knowledge_of(unlike, 30.0, BATCHES, kept(tmp_path, measured()))

    assert (found.probes, found.noise, found.parts) == ((), None, ())
