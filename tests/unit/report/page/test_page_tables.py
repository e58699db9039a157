"""The tables of the page: what stands in the columns of workers."""

from __future__ import annotations

import json

from evenstride.report.page.findings import workers_table
from evenstride.report.page.page_runs import ReportedRun, read_run
from tests.unit.report.conftest import Making


def shares(run: ReportedRun) -> dict[int, int]:
    """Return what the column of shares says, by rank."""
    table = workers_table(run)
    assert table is not None
    return {int(row[1]): int(row[2].replace(",", "")) for row in table.rows}


def test_the_share_is_that_of_the_last_step(made: Making) -> None:
    run = made(steps=80)
    table = run.legs[0].generation.table

    assert shares(run) == dict(enumerate(table.share[-1].tolist()))
    assert table.share[0].tolist() != table.share[-1].tolist()


def test_of_a_worker_that_reported_less_it_is_that_of_its_own_last_step(made: Making) -> None:
    run = made(steps=80)
    text = shares(run)
    path = run.story.path
    records = [json.loads(line) for line in path.read_text().splitlines()]
    last = [one["event"] for one in records if one.get("event", {}).get("observations")][-1]
    last["observations"] = [one for one in last["observations"] if one["worker"] != 1]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))

    cut = read_run(path, "cut")
    assert cut.legs[0].generation.table.share[-1, 1] == -1
    assert shares(cut) == text
