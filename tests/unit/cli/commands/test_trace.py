"""``evenstride trace``: what it writes and says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.messages import check_message
from tests.unit.cli.conftest import Shell
from tests.unit.report.perfetto.events import read_events
from tests.unit.report.virtual import VirtualRun


@pytest.fixture
def run(tmp_path: Path) -> VirtualRun:
    run = VirtualRun(tmp_path / "today" / "trace.jsonl", lambda _: (1.0, 0.5), workers=2)
    run.begin()
    run.run(30)
    return run


def test_it_writes_a_file_and_prints_its_contents(
    run: VirtualRun, shell: Shell, tmp_path: Path
) -> None:
    answer = shell("trace", "today")

    events = read_events(tmp_path / "perfetto.json.gz")
    assert answer.code == 0
    assert answer.err == ""
    check_message(answer.out, "perfetto.json.gz", f"{len(events.all):,}", "30 steps")


def test_json_is_one_object(run: VirtualRun, shell: Shell, tmp_path: Path) -> None:
    text = shell(
        "trace", "today/trace.jsonl", "-o", "out.json", "--steps", "10:20", "--json"
    ).json()

    events = read_events(tmp_path / "out.json")
    assert text == {
        "file": "out.json",
        "events": len(events.all),
        "steps": 10,
        "workers": 2,
        "processes": 1,
        "merged": [],
        "remarks": [],
    }
    assert len(events.slices("worker 0 (host/0)", "step")) == 10


def test_exports_are_taken_in(run: VirtualRun, shell: Shell, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_text(
            '{"traceEvents":[{"ph":"X","name":"a","pid":1,"tid":1,"ts":1.0,"dur":2.0}]}'
        )
    answer = shell("trace", "today", "--with", "rank0.json", "--with", "rank1.json")

    assert answer.out.splitlines()[1:] == [
        "rank 0: 1 events of rank0.json",
        "rank 1: 1 events of rank1.json",
    ]
    check_message(answer.err, "rank0.json", "rank1.json")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("rank2.json", ("rank2.json", "rank 2", "ranks 0")),
        ("7=rank0.json", ("rank0.json", "rank 7", "ranks 0")),
    ],
)
def test_an_export_of_an_unknown_rank_is_refused(
    run: VirtualRun, shell: Shell, given: str, text: tuple[str, ...]
) -> None:
    Path(given.partition("=")[2] or given).write_text(
        '{"traceEvents":[{"ph":"X","name":"a","pid":1,"tid":1,"ts":1.0,"dur":2.0}]}'
    )

    check_message(shell("trace", "today", "--with", given).refusal(), *text)
    assert not list(Path().glob("perfetto*"))


def test_ranks_of_workers_that_shard_a_replica_have_exports_of_their_own(
    shell: Shell, tmp_path: Path
) -> None:
    run = VirtualRun(
        tmp_path / "today" / "trace.jsonl", lambda _: (1.0,), 1, header={"world_size": 4}
    )
    run.begin()
    run.run(9)
    (tmp_path / "rank3.json").write_text('{"traceEvents":[]}')

    assert shell("trace", "today", "--with", "rank3.json").code == 0


def test_what_could_not_be_read_is_reported_on_stderr(run: VirtualRun, shell: Shell) -> None:
    with run.writer.path.open("ab") as file:
        file.write(b'{"kind":"event","at_s":1')
    answer = shell("trace", "today", "--json")

    assert answer.code == 0
    assert answer.json()["steps"] == 30
    assert answer.err.startswith("note: line ")
    assert "is incomplete: 24 bytes" in answer.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "20"], ("--steps", "'20'")),
        (["--steps", "20:10"], ()),
        (["--steps", "900:"], ("900", "0:30")),
        (["--with", "none.json"], ("none.json",)),
        (["-o", "no/where.json"], ("where.json",)),
        (["-o", "today"], ()),
    ],
)
def test_invalid_options_are_refused_in_one_line(
    run: VirtualRun, shell: Shell, arguments: list[str], said: tuple[str, ...]
) -> None:
    check_message(shell("trace", "today", *arguments).refusal(), *said)


def test_of_several_runs_one_must_be_named(run: VirtualRun, shell: Shell, tmp_path: Path) -> None:
    assert shell("trace", ".").code == 0, "one run below the folder"
    other = VirtualRun(tmp_path / "older" / "trace.jsonl", lambda _: (1.0,), workers=1)
    other.begin()

    refusal = shell("trace", ".").refusal()
    check_message(refusal, "2 runs", "older/trace.jsonl", "today/trace.jsonl")


def test_a_missing_run_is_refused(shell: Shell) -> None:
    assert "no trace at" in shell("trace", "nowhere").refusal()


def test_an_export_is_overwritten_and_no_other_file(
    run: VirtualRun, shell: Shell, tmp_path: Path
) -> None:
    for name in ("out.json", "out.json.gz"):
        place = tmp_path / name
        place.touch()  # as mktemp leaves it
        assert shell("trace", str(run.writer.path), "-o", str(place)).code == 0
        assert shell("trace", str(run.writer.path), "-o", str(place)).code == 0
        place.write_text("a letter")
        refused = shell("trace", str(run.writer.path), "-o", str(place))

        assert refused.code != 0
        assert place.read_text() == "a letter"


def test_only_plain_files_are_overwritten(run: VirtualRun, shell: Shell) -> None:
    os.mkfifo("pipe.json")

    check_message(shell("trace", "today", "-o", "pipe.json").refusal(), "pipe.json")
