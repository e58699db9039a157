"""``evenstride estimate``."""

from __future__ import annotations

import pytest

from tests.messages import check_message
from tests.unit.cli.conftest import Shell


def test_three_workers_of_which_one_is_slow_would_be_twice_as_fast(shell: Shell) -> None:
    answer = shell("estimate", "1,1,0.4")

    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[1].split() == ["equal", "64", "/", "64", "/", "64", "2.500"]
    assert lines[2].split() == ["balanced", "80", "/", "80", "/", "32", "1.250"]
    check_message(lines[3], "2.00", "50%")
    assert len(lines) == 4


def test_equal_workers_are_not_worth_it(shell: Shell) -> None:
    answer = shell("estimate", "1,1,1")

    assert answer.code == 0
    check_message(answer.out, "1.00", "0%")
    check_message(answer.out.splitlines()[-1], "3%")


@pytest.mark.parametrize(
    ("speeds", "worth_it"), [("1,0.9", True), ("1,0.95", False), ("100,60", True)]
)
def test_a_gain_is_worth_it_from_3_percent_on(shell: Shell, speeds: str, worth_it: bool) -> None:
    answer = shell("estimate", speeds, "--global-batch", "1000")

    assert ("not worth it" not in answer.out) is worth_it
    assert shell("estimate", speeds, "-b", "1000", "--json").json()["worth_it"] is worth_it


def test_json_is_one_object_with_both_splits(shell: Shell) -> None:
    answer = shell("estimate", "1,1,0.4", "--json")

    plain = answer.json()
    assert (answer.code, answer.err) == (0, "")
    assert plain == {
        "speeds": [1.0, 1.0, 0.4],
        "global_batch": 192,
        "equal": {"shares": [64, 64, 64], "step": pytest.approx(2.5)},
        "balanced": {"shares": [80, 80, 32], "step": pytest.approx(1.25)},
        "bound": pytest.approx(2.0),
        "linear_bound": pytest.approx(2.0),
        "gain": pytest.approx(0.5),
        "worth_it": True,
    }


def test_the_unit_of_the_speeds_does_not_matter(shell: Shell) -> None:
    small = shell("estimate", "1,0.25", "--json").json()
    large = shell("estimate", "400,100", "--json").json()

    assert {**small, "speeds": 0} == {**large, "speeds": 0}


def test_a_fixed_part_lowers_what_can_be_gained_but_not_the_linear_bound(shell: Shell) -> None:
    plain = shell("estimate", "1,0.5", "-b", "120", "--fixed", "0.5", "--json").json()

    # In units of the fastest worker's equal step: 0.5 + 0.5 n/60 and twice that; at 90 and 30
    # samples 1.25 and 1.5, at 100 and 20 both take 4/3.
    assert plain["equal"] == {"shares": [60, 60], "step": pytest.approx(2.0)}
    assert plain["balanced"] == {"shares": [100, 20], "step": pytest.approx(4 / 3)}
    assert plain["bound"] == pytest.approx(1.5)
    assert plain["linear_bound"] == pytest.approx(1.5)


def test_many_workers_are_shortened(shell: Shell) -> None:
    answer = shell("estimate", ",".join(["1"] * 7 + ["0.5"]))

    words = " ".join(answer.out.splitlines()[1].split())
    assert words == "equal 64 / 64 / 64 / 64 / 64 / 64 / ... 2.000"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["1,fast"], ("'1,fast'",)),
        (["1,,1"], ()),
        ([""], ()),
        (["0,1"], ("1,1,0.4",)),
        (["1,nan"], ()),
        (["1,inf"], ()),
        (["--", "-1,1"], ()),
        (["1,1", "-b", "1"], ()),
        (["1,1", "-b", "-3"], ("-3 samples",)),
        (["1,1", "--fixed", "1"], ("1.0",)),
        (["1,1", "--fixed", "-0.1"], ("-0.1",)),
        (["1,1", "--fixed", "nan"], ()),
    ],
)
def test_wrong_input_gets_one_line_on_stderr_and_exit_code_2(
    shell: Shell, arguments: list[str], text: tuple[str, ...]
) -> None:
    check_message(shell("estimate", *arguments).refusal(), *text)
    check_message(shell("estimate", "--json", *arguments).refusal(), *text)


@pytest.mark.parametrize("arguments", [[], ["1,1", "-b", "many"], ["1,1", "--what"], ["1", "1"]])
def test_arguments_that_do_not_fit_the_command_end_with_code_2(
    shell: Shell, arguments: list[str]
) -> None:
    answer = shell("estimate", *arguments)

    assert (answer.code, answer.out) == (2, "")
    assert "Usage: evenstride estimate" in answer.err
