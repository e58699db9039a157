"""What traces tell of a workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evenstride.errors import ConfigError, TraceError
from evenstride.planner.workload.from_trace import curve_points, facts, noise_of, profile_of_run
from evenstride.planner.workload.step_time import links
from evenstride.planner.workload.workload_profile import Links, WorkloadProfile
from evenstride.trace.run_log import RunLog, read_course
from tests.messages import raises_message
from tests.unit.lab.traces import write_calibration
from tests.unit.planner.runs import life, noisy, went


def lone(folder: Path, *more: dict[str, Any]) -> Path:
    """Return the trace of a lone process that trained on two sizes, with more records."""
    path = folder / "trace.jsonl"
    path.unlink(missing_ok=True)
    write_calibration(path, {8: [9.0, 0.1, 0.1, 0.1], 32: [9.0, 0.3, 0.3, 0.3]})
    lines = path.read_text().splitlines()
    header = json.loads(lines[0])
    header.update(evenstride="0.1.0", torch="2.13.0", world_size=1, started_unix_s=1.77e9)
    header.update(global_batch=32)
    workload: dict[str, Any] = {
        "kind": "workload",
        "parameters": 10,
        "gradient_bytes": 40,
        "digest": "d",
    }
    workload.update(samples=640, device="")
    records = [json.dumps(one) for one in (workload, *more)]
    path.write_text("\n".join([json.dumps(header), *lines[1:], *records]) + "\n")
    return path


def test_steps_by_size_without_the_first_of_each_of_a_lone_process(tmp_path: Path) -> None:
    small, large = curve_points(lone(tmp_path))

    assert (small.samples, large.samples) == (8, 32)
    assert (small.step_s, large.step_s) == pytest.approx((0.1, 0.3))


def test_a_run_makes_a_profile(tmp_path: Path) -> None:
    found = profile_of_run(lone(tmp_path), ["box"])

    assert (found.samples, found.global_batch, found.model.digest) == (640, 32, "d")
    assert [device.type for device in found.devices] == ["box"]
    assert found.links is None
    assert found.noise is None
    with raises_message(ConfigError, "1 workers"):
        profile_of_run(lone(tmp_path), ["box", "other"])


def test_noise_is_in_samples_whatever_losses_are_means_over(tmp_path: Path) -> None:
    """Of a batch of 32 samples with 10 tokens each; a scale of 3200 tokens is 320 samples."""
    steps = [
        {
            "kind": "noise",
            "step": n,
            "parts": 2,
            "batch": 320,
            "local": 2.0 + 10.0,
            "mean": 1.0 + 5.5,
        }
        for n in range(20)
    ]
    reported = noise_of(read_course(lone(tmp_path, *steps)))
    plain = noise_of(read_course(lone(tmp_path, *({**one, "batch": 32} for one in steps))))

    assert reported is not None
    assert plain is not None
    assert reported.scale == pytest.approx(plain.scale)


def test_noise_computed_below_0_counts_as_0(tmp_path: Path) -> None:
    steps = [
        {"kind": "noise", "step": n, "parts": 2, "batch": 32, "local": 0.9, "mean": 1.0}
        for n in range(20)
    ]
    reported = noise_of(read_course(lone(tmp_path, *steps)))

    assert reported is not None
    assert reported.scale == 0.0


def test_a_trace_that_does_not_say_what_was_trained_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_calibration(path, {8: [0.1, 0.1]})

    with raises_message(TraceError):
        facts(RunLog(path))


def test_links_follow_from_two_numbers_of_workers() -> None:
    def time_s(workers: int) -> float:
        return 2 * (workers - 1) * (2e-4 + 1e8 / workers / 1e9)

    found = links([(2, time_s(2)), (4, time_s(4)), (8, time_s(8))], 1e8)

    assert found is not None
    assert found.latency_s == pytest.approx(2e-4)
    assert found.bytes_per_s == pytest.approx(1e9)


def test_with_one_number_of_workers_most_of_it_is_bandwidth() -> None:
    found = links([(2, 0.08)], 1e8)

    assert found is not None
    assert found.latency_s == 1e-4
    assert found.bytes_per_s == pytest.approx(1e8 / (0.08 - 2e-4), rel=1e-6)
    assert links([(1, 0.0)], 1e8) is None
    assert links([(2, 0.0)], 1e8) == Links(latency_s=0.0)


def test_communication_that_grows_by_its_messages_alone_is_latency() -> None:
    """As scatter may have it, the best bandwidth would be below 0; not a slow link, then."""
    found = links([(2, 0.008), (4, 0.024), (8, 0.060)], 5e5)

    assert found is not None
    assert found.bytes_per_s is None
    assert found.latency_s == pytest.approx(0.0041, rel=0.03)


def test_communication_that_hardly_grows_with_workers_is_bandwidth() -> None:
    found = links([(2, 0.100), (4, 0.120), (8, 0.130)], 1e8)

    assert found is not None
    assert found.latency_s == 0.0
    assert found.bytes_per_s == pytest.approx(1.3e9, rel=0.1)


def test_noise_of_a_whole_training_is_that_of_all_its_steps(tmp_path: Path) -> None:
    """Not of its last hundred steps."""
    passes = [went(100 * e, float(e)) for e in range(10)]
    path = life(tmp_path, [*passes, *(noisy(n, 100.0 + n) for n in range(1000))])

    whole, part = (noise_of(read_course(path), until=until) for until in (20.0, 2.0))

    assert whole is not None
    assert whole.scale == pytest.approx(599.5)
    assert part is not None
    assert part.scale == pytest.approx(199.5)
    assert part.low < 199.5 < (part.high or 0.0)
    assert part.settled is whole.settled is None


def test_noise_counts_from_the_step_where_it_has_settled(tmp_path: Path) -> None:
    rising = [noisy(n, 1.0 + 9.0 * n) for n in range(100)]

    found = noise_of(read_course(life(tmp_path, [*rising, *(noisy(n, 900.0) for n in range(300))])))

    assert found is not None
    assert found.settled
    assert found.scale == pytest.approx(900.0, rel=0.05)


def test_noise_that_has_not_settled_says_so_and_includes_its_change(tmp_path: Path) -> None:
    steps = [noisy(n, 2.0**n) for n in range(24)]

    found = noise_of(read_course(life(tmp_path, steps[:12])))
    short = noise_of(read_course(life(tmp_path, steps[:3])))

    assert found is not None and short is not None
    assert found.settled is short.settled is False
    assert found.high is None or found.high > 2.0**11, "as far as it has come"


def test_an_epochs_short_last_step_does_not_change_the_unit(tmp_path: Path) -> None:
    steps = [noisy(n, 300.0, batch=512 if n % 3 else 128) for n in range(30)]

    reported = noise_of(read_course(life(tmp_path, steps)))

    assert reported is not None
    assert reported.scale == pytest.approx(300.0)


def _steps_s(found: WorkloadProfile) -> dict[str, list[float]]:
    """Return the mean times of steps on each type, in order of time."""
    return {one.type: sorted(point.step_s for point in one.points) for one in found.devices}


def test_a_run_that_was_continued_counts_as_a_whole(tmp_path: Path) -> None:
    """Of three workers at first, of which one was lost, with its share of the batch."""
    life(tmp_path, busy_s={0: 0.1, 1: 0.2, 2: 0.9}, workers=("a/0", "b/1", "c/2"), batch=510)
    path = life(tmp_path, busy_s={0: 0.22, 1: 0.12}, workers=("b/0", "a/1"), batch=510)

    alike, named = profile_of_run(path, ["box"]), profile_of_run(path, ["slow", "fast"])

    assert _steps_s(alike) == {"box": pytest.approx([0.1, 0.12, 0.2, 0.22, 0.9])}
    assert _steps_s(named) == {
        "slow": pytest.approx([0.2, 0.22]),
        "fast": pytest.approx([0.1, 0.12]),
    }, "by their hosts; of what c was nothing is known"
    with raises_message(ConfigError, "2 workers"):
        profile_of_run(path, ["slow", "fast", "other"])


def test_links_are_those_of_the_last_life(tmp_path: Path) -> None:
    life(tmp_path, busy_s=dict.fromkeys(range(4), 0.1), workers=("a/0", "b/1", "c/2", "d/3"))
    path = life(tmp_path, busy_s={0: 0.1, 1: 0.1}, workers=("a/0", "b/1"))

    found = profile_of_run(path, ["box"])

    assert found.links == links([(2, 0.05)], 4e6)
    assert facts(RunLog(path)).workers == 2


def test_a_last_life_without_a_step_changes_nothing(tmp_path: Path) -> None:
    path = life(tmp_path, busy_s={0: 0.1, 1: 0.2}, workers=("a/0", "b/1"))
    whole = profile_of_run(path, ["slow", "fast"])
    header = json.loads(path.read_text().splitlines()[0])
    with path.open("a") as file:
        file.write(json.dumps({**header, "world_size": 7, "global_batch": 64}) + "\n")

    assert profile_of_run(path, ["slow", "fast"]) == whole


def test_a_life_of_another_model_is_another_workload(tmp_path: Path) -> None:
    life(tmp_path, busy_s={0: 0.4}, digest="other")
    path = life(tmp_path, busy_s={0: 0.1})

    # A lone worker's waits are its own.
    assert _steps_s(profile_of_run(path, ["box"])) == {"box": pytest.approx([0.15])}


def test_workers_of_one_host_and_several_types_are_known_by_their_names(tmp_path: Path) -> None:
    life(tmp_path, busy_s={0: 0.1, 1: 0.2, 2: 0.3}, workers=("a/0", "a/1", "a/2"), batch=510)
    path = life(tmp_path, busy_s={0: 0.1, 1: 0.2}, workers=("a/0", "a/1"), batch=510)

    found = profile_of_run(path, ["gpu", "cpu"])

    assert _steps_s(found) == {
        "gpu": pytest.approx([0.1, 0.1]),
        "cpu": pytest.approx([0.2, 0.2]),
    }


def test_a_type_of_which_nothing_was_measured_is_refused(tmp_path: Path) -> None:
    path = life(tmp_path, busy_s={0: 0.1}, workers=("a/0", "b/1"))

    with raises_message(TraceError):
        profile_of_run(path, ["gpu", "cpu"])
    assert _steps_s(profile_of_run(path, ["gpu"])) == {"gpu": pytest.approx([0.1])}


def test_a_run_whose_times_do_not_count_has_no_devices(tmp_path: Path) -> None:
    path = life(tmp_path, [noisy(3, 50.0)] * 2, busy_s={0: 0.1, 1: 0.1}, workers=("a/0", "b/1"))

    found = profile_of_run(path, ())

    assert found.devices == ()
    assert found.links is not None
    assert found.noise is not None


def _changed(path: Path, kind: str, **changes: Any) -> Path:
    """Change records of a kind in a trace; a field that is to be ``...`` is taken out."""
    records = [json.loads(one) for one in path.read_text().splitlines()]
    for record in records:
        if record["kind"] == kind:
            record.update(changes)
    kept = [{k: v for k, v in one.items() if v is not ...} for one in records]
    path.write_text("".join(json.dumps(one) + "\n" for one in kept))
    return path


@pytest.mark.parametrize(
    ("kind", "changes", "reported"),
    [
        ("header", {"torch": ...}, ("'header'",)),
        ("header", {"global_batch": "many"}, ("global_batch",)),
        ("header", {"started_unix_s": 1e30}, ("1e+30 s", "1970")),
        ("workload", {"samples": ...}, ("'workload'",)),
        ("workload", {"parameters": 0}, ()),
        ("workload", {"samples": 0}, ()),
        ("workload", {"samples": 2**48}, ("length",)),
        ("event", {"event": 3}, ("'event'",)),
        ("instructions", {"instructions": [3]}, ()),
    ],
)
def test_a_damaged_trace_is_refused_with_the_damage(
    tmp_path: Path, kind: str, changes: dict[str, Any], reported: tuple[str, ...]
) -> None:
    path = _changed(life(tmp_path, busy_s={0: 0.1}), kind, **changes)

    with raises_message(TraceError, *reported):
        profile_of_run(path, ["box"])


def test_a_name_that_is_too_long_for_a_type_is_refused(tmp_path: Path) -> None:
    path = life(tmp_path, busy_s={0: 0.1})

    with raises_message(TraceError, "200", "--as"):
        profile_of_run(path, ["x" * 201])
