"""The three most important sentences about a run whose truth is known."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from evenstride.report.analysis.key_findings import compared_findings, key_findings
from tests.messages import check_message
from tests.unit.report.conftest import Making

SLOW = (200, (1.0, 0.5, 0.15))


def ms(sentence: str) -> list[float]:
    """Return the times in a sentence, all in milliseconds."""
    return [float(number) for number in re.findall(r"([\d.]+) ms", sentence)]


def test_a_balanced_run_states_both_step_times(made: Making) -> None:
    gain, slowest, _ = made(steps=400, noise=0.01).findings

    balanced, equal = ms(gain)
    # The whole batch at a speed of 1.8, and 86 samples at 0.3, each with 6 ms of communication.
    assert balanced == pytest.approx(1e3 * (0.03 + 0.256) / 1.8 + 6, rel=0.08)
    assert equal == pytest.approx(1e3 * (0.01 + 0.086) / 0.3 + 6, rel=0.08)
    check_message(slowest)


def test_an_equal_run_names_the_slowest_worker_and_its_ratio(made: Making) -> None:
    gain, slowest, waiting = made(steps=400, policy="uniform", noise=0.01).findings

    equal, balanced = ms(gain)
    assert equal > 1.5 * balanced
    found = re.fullmatch(
        r"Worker 2 is the slowest: its steps take ([\d.]+) times as long as any other worker's\.",
        slowest,
    )
    assert found, slowest
    assert float(found[1]) == pytest.approx(0.5 / 0.3, abs=0.1)
    check_message(waiting, "%")


def test_a_worker_that_slowed_down_is_the_third_finding(made: Making) -> None:
    *_, third = made(steps=400, changes=(SLOW,), noise=0.01).findings

    assert re.fullmatch(r"Worker 2 ran at 0\.\d+ of its best speed since step 200\.", third), third


def test_a_split_that_is_worse_than_the_equal_one_is_reported_first(made: Making) -> None:
    run = made(steps=60, policy="static:100,100,56", speeds=(1.0, 1.0, 1.0), noise=0.0)

    actual, equal = ms(run.findings[0])
    assert actual > equal
    check_message(run.findings[0])


def test_equal_workers_gain_little(made: Making) -> None:
    run = made(steps=200, speeds=(1.0, 1.0, 1.0), noise=0.005)

    check_message(run.findings[:2], "2%")


def test_a_best_split_that_is_slower_than_the_equal_one_reads_as_slower(made: Making) -> None:
    run = made(steps=200, speeds=(1.0, 1.0, 1.0), noise=0.005)
    # Bounds that narrowed during the run may exclude the equal split.
    totals = replace(run.totals, best_s=1.01 * run.totals.equal_s, judged_s=run.totals.equal_s)

    gain, *_ = key_findings(run.legs[-1], totals, "bsp", [])

    check_message(gain, "1.0% slower")


@pytest.mark.parametrize(
    ("speeds", "sync"), [((1.0,), "bsp"), ((1.0, 0.5), "asp")], ids=["one worker", "asp"]
)
def test_without_waits_no_gain_is_reported(
    made: Making, speeds: tuple[float, ...], sync: str
) -> None:
    run = made(steps=20, policy="uniform", speeds=speeds, header={"sync": sync})

    check_message(run.findings)


def test_a_run_without_steps_says_so(made: Making) -> None:
    check_message(made(steps=0).findings)


def test_sentences_have_fewer_than_25_words(made: Making) -> None:
    runs = [
        made(steps=400, changes=(SLOW,), noise=0.01),
        made(steps=400, policy="uniform", noise=0.01),
        made(steps=200, speeds=(1.0, 1.0, 1.0), noise=0.005),
        made(steps=20, policy="uniform", header={"sync": "asp"}),
        made(steps=0),
    ]

    for sentence in (sentence for run in runs for sentence in run.findings):
        assert len(sentence.split()) < 25, sentence
    assert all(len(run.findings) <= 3 for run in runs)


def test_several_runs_are_compared_by_speed_and_each_names_its_slowest(made: Making) -> None:
    runs = {"equal": made(steps=200, policy="uniform"), "balanced": made(steps=200)}

    compared, first, second = compared_findings(
        [(name, run.totals, run.findings) for name, run in runs.items()]
    )

    ratio = runs["balanced"].totals.samples_per_s / runs["equal"].totals.samples_per_s
    assert compared == (f"balanced trains {ratio:.2f} times as many samples per second as equal.")
    assert first == f"equal: {runs['equal'].findings[1]}"
    assert second.startswith("balanced: ")


def test_runs_without_steps_are_not_compared(made: Making) -> None:
    run = made(steps=0)

    check_message(compared_findings([("a", run.totals, run.findings)] * 2))
