"""A wrong scenario file is refused with file, line, field and what is allowed there."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.errors import ScenarioError
from evenstride.sim.scenario.recordings import load_recording
from evenstride.sim.scenario.scenario_events import LoadReplay
from evenstride.sim.scenario.scenario_file import load_scenario
from tests.messages import check_message

GOOD = """\
name: good
global_batch: 64
steps: 100
workers:
  - {name: x, count: 2, samples_per_s: 100}
  - {name: y, samples_per_s: 50, max_share: 40}
"""
REPLAY = "events:\n  - kind: replay\n    at: 0\n    workers: all\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file that tests write."""
    return tmp_path / "made.yaml"


def refusal(path: Path, text: str) -> str:
    """Return the message about a file with this text, without the path of its folder."""
    path.write_text(text)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_the_good_file_is_read(path: Path) -> None:
    path.write_text(GOOD)

    made = load_scenario(path)

    assert (made.name, made.global_batch, made.steps, made.size) == ("good", 64, 100, 3)
    assert [group.samples_per_s for group in made.workers] == [100.0, 50.0]
    assert (made.exchange.lag, made.exchange.cold_lag, made.exchange.every) == (1, None, 1)


VALUES = [
    ("64", "many", "made.yaml:2: global_batch: 'many' (Input should be a valid integer)"),
    ("64", "-3", "made.yaml:2: global_batch: -3 (Input should be greater than or equal to 1)"),
    ("64", "64.5", "made.yaml:2: global_batch: 64.5 (Input should be a valid integer)"),
    ("64", "{of: 64}", "made.yaml:2: global_batch: {'of': 64} (Input should be a valid integer)"),
    ("64", "yes", "made.yaml:2: global_batch: 'yes' (Input should be a valid integer)"),
    ("64", "~", "made.yaml:2: global_batch: empty (Input should be a valid integer)"),
    ("64", "1:30", "made.yaml:2: global_batch: '1:30' (Input should be a valid integer)"),
    ("64", "2,000", "made.yaml:2: global_batch: '2,000' (Input should be a valid integer)"),
    ("64", "1e99", "made.yaml:2: global_batch: 1e+99 (Input should be a valid integer)"),
    ("64", ".nan", "made.yaml:2: global_batch: nan (Input should be a valid integer)"),
    ("100}", ".nan}", "made.yaml:5: workers[0].samples_per_s: nan (Input should be less than or"),
    ("100}", "-.inf}", "made.yaml:5: workers[0].samples_per_s: -inf (Input should be greater than"),
    ("100}", "1e-9}", "made.yaml:5: workers[0].samples_per_s: 1e-09 (Input should be greater than"),
    ("50,", "50, noise: 3,", "workers[1].noise: 3 (Input should be less than or equal to 2)"),
    ("50,", "50, spike_rate: 2,", "workers[1].spike_rate: 2 (Input should be less than or equal"),
    ("50,", "50, cores: .inf,", "workers[1].cores: inf (Input should be less than or equal to 1"),
    ("good", "''", "made.yaml:1: name: '' (String should have at least 1 character)"),
    ("good", "5", "made.yaml:1: name: 5 (Input should be a valid string)"),
]


@pytest.mark.parametrize(("old", "new", "text"), VALUES, ids=[f"{o}={n}" for o, n, _ in VALUES])
def test_a_wrong_value_is_refused_with_its_line_and_the_range(
    path: Path, old: str, new: str, text: str
) -> None:
    assert old in GOOD
    said = refusal(path, GOOD.replace(old, new))

    assert text in said
    assert said.startswith("made.yaml:")
    assert "\n" not in said


EVENTS = [
    (
        "{kind: off, at: 3, workers: 0}",
        "made.yaml:8: events[0]: unknown kind 'off' (allowed: 'step',",
    ),
    ("{at: 3, workers: 0}", "(Unable to extract tag using discriminator 'kind')"),
    (
        "{kind: step, at: 3, workers: 0, speed: 2, untill: 9}",
        "made.yaml:8: events[0].untill: unknown field; did you mean until?",
    ),
    ("{kind: leave, workers: 0}", "made.yaml:8: events[0].at: Field required"),
    (
        "{kind: leave, at: 100, workers: 0}",
        "events[0].at: 100 is not a step of the run (allowed: 0 to 99)",
    ),
    ("{kind: leave, at: 3, workers: 3}", "events[0].workers: 3 is not a worker (allowed: 0 to 2)"),
    (
        "{kind: leave, at: 3, workers: [0, 7]}",
        "events[0].workers: 7 is not a worker (allowed: 0 to",
    ),
    ("{kind: leave, at: 3, workers: -1}", "events[0].workers: -1 (allowed: the number of a worker"),
    ("{kind: leave, at: 3, workers: some}", "events[0].workers: 'some' (allowed: the number of"),
    ("{kind: leave, at: 3, workers: []}", "events[0].workers: [] (allowed: the number of a worker"),
    ("{kind: leave, at: 3, workers: [1, 1]}", "events[0].workers: [1, 1] names a worker twice"),
    ("{kind: leave, at: 3, workers: 1.5}", "events[0].workers: 1.5 (allowed: the number of a wor"),
    ("{kind: step, at: 9, until: 9, workers: 0, speed: 2}", "events[0].until: 9 is not after at"),
    (
        "{kind: replay, at: 3, workers: 0, day: monday}",
        "events[0].day: 'monday' (Input should be '20110303', '20110322' or '20110412')",
    ),
    (
        "{kind: replay, at: 3, workers: all, machines: [1, 2]}",
        "events[0].machines: 2 machines for 3 workers (allowed: one per worker)",
    ),
    ("{kind: leave, at: 3, workers: all}", "events[0].workers: no worker is present at step 3"),
    (
        "{kind: leave, at: 3, workers: [0, 1]}",
        "events[0].workers: a global batch of 64 cannot be split over the worker present at step 3 "
        "(allowed by min_share and max_share: 1 to 40)",
    ),
]


@pytest.mark.parametrize(("event", "text"), EVENTS, ids=[event for event, _ in EVENTS])
def test_a_wrong_event_is_refused_with_its_line(path: Path, event: str, text: str) -> None:
    said = refusal(path, f"{GOOD}events:\n  - {event}\n")

    assert said.startswith("made.yaml:8: ")
    assert text in said
    assert "\n" not in said


def test_the_line_is_that_of_the_field_and_not_of_its_event(path: Path) -> None:
    events = "events:\n  - kind: step\n    at: 3\n    workers: 0\n    speed: fast\n"

    assert refusal(path, GOOD + events).startswith("made.yaml:11: events[0].speed: 'fast'")


MEMBERSHIP = [
    (
        [("leave", 3, 1), ("leave", 9, 1)],
        ("events[1].workers", "worker 1", "step 9"),
    ),
    ([("leave", 9, 1), ("leave", 3, 1)], ("events[0].workers", "worker 1", "step 9")),
    (
        [("join", 3, 1), ("join", 9, 1)],
        ("events[1].workers", "worker 1", "step 9"),
    ),
    ([("join", 5, "all")], ("events[0].workers", "step 0")),
    ([("leave", 3, 0), ("leave", 5, "[1, 2]")], ("events[1].workers", "step 5")),
    ([("join", 3, "[0, 1]")], ("global_batch", "64")),
    ([("leave", 0, "all")], ("events[0].workers", "step 0")),
]


@pytest.mark.parametrize(("moves", "text"), MEMBERSHIP, ids=str)
def test_membership_that_leaves_too_few_workers_is_refused(
    path: Path, moves: list[tuple[str, int, object]], text: tuple[str, ...]
) -> None:
    events = "".join(f"  - {{kind: {k}, at: {a}, workers: {w}}}\n" for k, a, w in moves)

    check_message(refusal(path, f"{GOOD}events:\n{events}"), *text)


def test_workers_may_join_at_the_very_start(path: Path) -> None:
    path.write_text(f"{GOOD}events:\n  - {{kind: join, at: 0, workers: all}}\n")

    assert load_scenario(path).events[0].at == 0


def test_the_day_of_a_recording_may_be_written_as_a_number(
    path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_DATA", str(data_root))
    load_recording.cache_clear()
    path.write_text(f"{GOOD}{REPLAY}    day: 20110322\n")

    (event,) = load_scenario(path).events

    assert isinstance(event, LoadReplay)
    assert event.day == "20110322"


def test_workers_may_be_replaced_within_one_step(path: Path) -> None:
    events = "events:\n  - {kind: leave, at: 9, workers: [0, 1]}\n"
    path.write_text(GOOD.replace("40}", "64}") + events + "  - {kind: leave, at: 12, workers: 2}\n"
                    "  - {kind: join, at: 12, workers: 0}\n")  # fmt: skip

    assert len(load_scenario(path).events) == 3


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("max_share: 40", "min_share: 63", ("made.yaml", "global_batch", "64")),
        ("count: 2,", "max_share: 3,", ("made.yaml", "global_batch", "64")),
        ("max_share: 40", "max_share: 4, min_share: 5", ("workers[1].max_share", "min_share")),
        ("count: 2", "count: 1000000", ("made.yaml", "1000001 workers")),
    ],
)  # fmt: skip
def test_bounds_that_the_global_batch_cannot_meet_are_refused(
    path: Path, old: str, new: str, text: tuple[str, ...]
) -> None:
    check_message(refusal(path, GOOD.replace(old, new)), *text)


OTHERS = [
    ("STEPS: 3\n", "made.yaml:7: STEPS: unknown field; did you mean steps?"),
    ("exchange: {cold: 3}\n", "made.yaml:7: exchange.cold: unknown field"),
    ("5: 3\n", "made.yaml:7: '5' is not a field name"),
    ("? [1, 2]\n: 3\n", "made.yaml:7: the text before a colon is a list, not the name of a field"),
    ("steps: 5\n", "made.yaml:7: 'steps' is given twice"),
    ("exchange: 3\n", "made.yaml:7: exchange: 3 (Input should be a valid dictionary or instance"),
    (
        "exchange:\n  lag: 0\n",
        "made.yaml:8: exchange.lag: 0 (Input should be greater than or equal",
    ),
    ("exchange: {every: often}\n", "exchange.every: 'often' (allowed: an integer from 1 to 1e"),
    ("communication: {latency_s: .inf}\n", "communication.latency_s: inf (Input should be less"),
    ("events:\n", "made.yaml:7: events: empty (Input should be a valid list)"),
    ("about: !!python/object:os.system x\n", "made.yaml:7: about: it has the tag '!!python/objec"),
    ("events: [\n", "made.yaml:8: "),
    (
        "\tname: x\n",
        "made.yaml:7: found character '\\t' that cannot start any token: indent with spaces, not t",
    ),
    (
        " - {samples_per_s: 9}\n",
        "made.yaml:7: expected <block end>, but found '<block sequence start>': check the "
        "indentation against line 1",
    ),
    (
        "events:\n  - kind: leave\n    at: 3\n   workers: 0\n",
        "made.yaml:10: expected <block end>, but found '<block mapping start>': check the "
        "indentation against line 8",
    ),
    (
        "about: x\n  steps: 5\n",
        "made.yaml:8: mapping values are not allowed here: check the indentation, and put a text "
        "that has a colon in quotes",
    ),
    ("---\nname: x\n", "made.yaml:7: but found another document: a file holds one scenario"),
    (f"about: {'9' * 5000}\n", "made.yaml:7: about: inf (Input should be a valid string)"),
]


@pytest.mark.parametrize(("more", "text"), OTHERS, ids=[more[:30] for more, _ in OTHERS])
def test_other_errors_are_refused_with_their_line(path: Path, more: str, text: str) -> None:
    assert text in refusal(path, GOOD + more)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "- 1\n- 2\n", "hello\n", "5\n", "~\n"])
def test_a_file_without_a_scenario_is_refused(path: Path, text: str) -> None:
    empty = "the file is empty; " if text[:1] in "\n#" else ""
    fields = "(name, global_batch, workers, ...)"
    said = f"made.yaml:1: {empty}a scenario consists of names and values {fields}"
    assert refusal(path, text) == said


def test_all_missing_fields_are_reported_at_once(path: Path) -> None:
    said = refusal(path, "name: a\nworkers:\n  - {count: 3}\n").splitlines()

    assert said[0] == "made.yaml:1: global_batch: Field required"
    assert said[1] == "made.yaml:3: workers[0].samples_per_s: Field required"
    assert len(said) == 2


def test_a_file_without_workers_is_refused(path: Path) -> None:
    no_workers = GOOD.partition("workers")[0]

    check_message(refusal(path, f"{no_workers}workers: []\n"), "made.yaml")
    assert "made.yaml:1: workers: Field required" in refusal(path, no_workers)


def test_of_very_many_errors_the_first_ten_are_reported(path: Path) -> None:
    workers = "  - {samples_per_s: -1}\n" * 15

    said = refusal(path, f"name: a\nglobal_batch: 99\nworkers:\n{workers}").splitlines()

    assert len(said) == 11
    assert said[9].startswith("made.yaml:13: workers[9].samples_per_s: -1")
    assert said[10] == "made.yaml: and 5 more"


def test_a_long_value_is_shortened(path: Path) -> None:
    said = refusal(path, GOOD.replace("64", "x" * 500))

    assert len(said) < 200
    assert "xxx..." in said


@pytest.mark.parametrize("text", ["about: &a [*a]\n", "about: &a {x: *a}\n"])
def test_a_value_that_contains_itself_is_refused(path: Path, text: str) -> None:
    assert refusal(path, GOOD + text).startswith("made.yaml:7: ")


def test_a_value_that_stands_for_another_is_read(path: Path) -> None:
    shared = "- &x {name: x, samples_per_s: 9}\n  - {<<: *x, name: z}\n"
    path.write_text(f"{GOOD}  {shared}")

    assert [group.name for group in load_scenario(path).workers] == ["x", "y", "x", "z"]


def test_numbers_may_be_written_as_people_do(path: Path) -> None:
    path.write_text(GOOD.replace("100}", "1e2, fixed_s: 1.e-3, max_share: 1_000}"))

    group = load_scenario(path).workers[0]

    assert (group.samples_per_s, group.fixed_s, group.max_share) == (100.0, 0.001, 1000)


def test_an_unreadable_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00a")

    for path, reason in (
        (tmp_path / "gone.yaml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (binary, "it is not UTF-8 text"),
    ):
        with pytest.raises(ScenarioError) as caught:
            load_scenario(path)
        assert str(caught.value) == f"cannot read {path}: {reason}"


def test_a_missing_recording_is_refused_with_file_and_line(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_DATA", str(tmp_path))
    load_recording.cache_clear()

    said = refusal(path, GOOD + REPLAY)

    check_message(said, "made.yaml", "events[0].kind", "cpu.npz")


def test_machines_that_were_not_recorded_are_refused(
    path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_DATA", str(data_root))
    load_recording.cache_clear()

    unknown = refusal(path, f"{GOOD}{REPLAY}    machines: [0, 1, 99999]\n")
    many = refusal(path, f"{GOOD.replace('count: 2', 'count: 5000')}{REPLAY}".replace("64", "9999"))

    assert "made.yaml:11: events[0].machines: 99999 (allowed: a machine from 0 to 1051)" in unknown
    assert "made.yaml:10: events[0].workers: 5001 workers, but 1052 machines were recorded" in many


def test_a_quantum_that_allows_no_split_is_refused(path: Path) -> None:
    said = refusal(path, GOOD.replace("count: 2,", "count: 2, quantum: 64,"))

    check_message(said, "made.yaml:2", "global_batch", "step 0", "quantum")
