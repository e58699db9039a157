"""Tables and sentences of simulated runs, from rows made of numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenstride.report.suite_text import (
    comparison_sentence,
    comparison_table,
    grouped,
    lead,
    longer,
    means_line,
    simulation_sentence,
    simulation_table,
    times_sentence,
)
from evenstride.report.wording import duration
from evenstride.sim.scoring.suite import ScoreRow
from tests.messages import check_message

ROW = ScoreRow(
    *("h1", "adaptive", 1, 0),
    efficiency=0.9,
    efficiency_mean=0.8,
    informed=0.96,
    informed_real=0.91,
    efficiency_settled=0.99,
    speedup=1.5,
    bound=2.0,
    linear_bound=2.2,
    steps_to_95_cold=3,
    steps_to_95_after_change=5,
    needless_changes=2,
    decide_s=0.00125,
)


def rows(policy: str, *means: float, scenario: str = "h1", lag: int = 1) -> list[ScoreRow]:
    """Return a row for each seed."""
    return [
        replace(ROW, policy=policy, scenario=scenario, lag=lag, seed=seed, efficiency_mean=mean)
        for seed, mean in enumerate(means)
    ]


def test_a_line_has_means_medians_and_ninth_tenths() -> None:
    seeds = [
        replace(ROW, seed=1, efficiency=0.7, steps_to_95_cold=9, steps_to_95_after_change=None),
        replace(ROW, seed=2, needless_changes=5),
    ]

    (line,) = simulation_table(grouped([ROW, *seeds])).rows

    assert line == (
        *("h1", "adaptive", "1", "0.833", "0.800", "0.960", "0.910", "0.990"),
        *("3 / 9", "5 / never", "3.0", "1.25 ms", "1.50", "2.00", "2.20"),
    )


def test_an_unknown_value_is_a_dash() -> None:
    unsettled = replace(ROW, efficiency_settled=None, steps_to_95_after_change=None, decide_s=None)

    (line,) = simulation_table(grouped([unsettled], unjudged=[("h1", 1, 0)])).rows

    assert line[7] == "–"
    assert line[8:10] == ("3 / 3", "–")
    assert line[11] == "–"


def test_a_seed_in_which_nothing_changes_is_neither_slow_nor_quick_to_find_it_again() -> None:
    found = [None, 4, None, 8]
    seeds = [
        replace(ROW, seed=seed, steps_to_95_after_change=steps) for seed, steps in enumerate(found)
    ]

    def after(*unjudged: int) -> str:
        where = [("h1", 1, seed) for seed in unjudged] + [("h1", 2, 2), ("h2", 1, 2)]
        (line,) = simulation_table(grouped(seeds, where)).rows
        return line[9]

    assert after(0, 2) == "4 / 8"
    assert after(0) == "8 / never"
    assert after() == "8 / never"
    assert after(0, 1, 2, 3) == "–"


def test_a_single_run_is_reported_by_how_much_longer_it_takes() -> None:
    check_message(simulation_sentence(grouped([ROW])), "0.800", "25.0%", "4.2%")


def test_equal_batches_are_not_compared_with_themselves() -> None:
    output = simulation_sentence(grouped(rows("uniform", 0.125)))

    check_message(output, "8.0")
    assert "equal batches" not in output


@pytest.mark.parametrize(
    ("ratio", "output"),
    [
        (1.0004, ()),
        (1.0006, ("0.1%",)),
        (0.97, ("3.0%",)),
        (1.99, ("99.0%",)),
        (7.503, ("7.5",)),
    ],
)
def test_a_large_ratio_is_reported_as_a_factor(ratio: float, output: tuple[str, ...]) -> None:
    check_message(longer(ratio), *output)


@pytest.mark.parametrize(
    ("seconds", "output"), [(4e-6, "4 us"), (0.9, "900 ms"), (2.345, "2.35 s"), (5000, "5000 s")]
)
def test_a_time_has_a_unit_that_suits_it(seconds: float, output: str) -> None:
    assert duration(seconds) == output


def test_how_long_steps_take_is_given_once_for_all_settings() -> None:
    check_message(times_sentence([0.133], [0.88]), "133 ms", "880 ms")
    check_message(times_sentence([3.0, 0.133, 1.0], [3.0, 3.0, 3.0]), "133 ms", "3 s")


@pytest.mark.parametrize(
    ("seeds", "output"),
    [
        ([1, 1], ()),
        ([20, 20], ("20",)),
        ([3, 1], ()),
    ],
)
def test_it_is_reported_over_how_many_seeds_the_figures_are(
    seeds: list[int], output: tuple[str, ...]
) -> None:
    one, other = seeds

    groups = grouped([*rows("adaptive", *[0.9] * one), *rows("dbs", *[0.8] * other)])

    check_message(means_line(groups), *output)


def test_of_several_policies_the_best_is_reported() -> None:
    output = simulation_sentence(grouped([*rows("dbs", 0.7, 0.9), *rows("adaptive", 0.9, 0.8)]))

    check_message(output, "17.6%")


def test_for_several_settings_the_best_policies_are_counted() -> None:
    output = simulation_sentence(
        grouped(
            [
                *(*rows("dbs", 0.7), *rows("adaptive", 0.9)),
                *(*rows("dbs", 0.9, lag=3), *rows("adaptive", 0.7, lag=3)),
                *(*rows("dbs", 0.7, scenario="h2"), *rows("adaptive", 0.9, scenario="h2")),
            ]
        )
    )

    check_message(output)


def test_what_does_not_differ_is_no_win() -> None:
    ours, level, behind = rows("adaptive", 0.9), rows("dbs", 0.8995), rows("uniform", 0.5)

    all_level = simulation_sentence(grouped([*ours, *level]))
    two_level = simulation_sentence(grouped([*ours, *level, *behind]))
    ahead = simulation_sentence(grouped([*ours, *rows("dbs", 0.8985), *behind]))

    check_message(all_level, "0.1%", "11.1%")
    check_message(two_level, "0.1%")
    check_message(ahead)


def test_settings_in_which_the_best_do_not_differ_are_no_wins() -> None:
    level = [*rows("adaptive", 0.9), *rows("dbs", 0.9)]
    won = [*rows("adaptive", 0.9, lag=3), *rows("dbs", 0.8, lag=3)]
    more = [*rows("adaptive", 0.9, lag=8), *rows("dbs", 0.9, lag=8)]

    check_message(simulation_sentence(grouped([*level, *won])), "0.1%")
    check_message(simulation_sentence(grouped([*level, *more])), "0.1%")


def test_of_one_policy_in_several_settings_the_weakest_is_reported() -> None:
    # The weaker one is also the one that is closer to the informed controller.
    weak = [replace(row, informed=0.6) for row in rows("dbs", 0.6, scenario="h2")]

    output = simulation_sentence(grouped([*rows("dbs", 0.9), *weak]))

    check_message(output)


def test_the_lead_is_paired_by_seed_and_part_of_the_others() -> None:
    groups = grouped(
        [*rows("adaptive", 0.6, 0.9), *rows("dbs", 0.5, 0.8), *rows("uniform", 0.1, 0.1)]
    )

    found = lead(groups)

    assert found is not None
    assert (found.other, found.setting) == ("dbs", ("h1", 1))
    assert found.ahead == pytest.approx((0.1 / 0.5 + 0.1 / 0.8) / 2)
    assert found.interval == pytest.approx((0.1 / 0.8, 0.1 / 0.5))
    assert found.text() == "+16.2% [+12.5%, +20.0%]"


def test_with_one_seed_a_lead_has_no_interval() -> None:
    found = lead(grouped([*rows("adaptive", 0.6), *rows("dbs", 0.8)]))

    assert found is not None
    assert found.text() == "-25.0%"


@pytest.mark.parametrize("policies", [["adaptive"], ["dbs", "uniform"]])
def test_without_ours_or_without_others_no_lead_is_reported(policies: list[str]) -> None:
    groups = grouped([row for policy in policies for row in rows(policy, 0.5)])

    assert lead(groups) is None
    assert comparison_table(groups).headings[-1] == "informed"
    assert comparison_sentence(groups) == simulation_sentence(groups)


def test_the_comparison_has_a_column_for_each_policy_and_marks_the_best() -> None:
    groups = grouped(
        [
            *(*rows("adaptive", 0.9), *rows("dynamic-batching", 0.8), *rows("static:2,1", 0.9)),
            *(*rows("adaptive", 0.5, lag=3), *rows("dynamic-batching", 0.6, lag=3)),
        ]
    )

    table = comparison_table(groups)

    assert table.headings == (
        *("scenario", "lag", "adaptive", "dynamic-\nbatching", "static:\n2,1", "informed"),
        *("adaptive against\nthe best other", "the same,\nreal time"),
    )
    assert table.rows == (
        ("h1", "1", "0.900*", "0.800 ", "0.900*", "0.960", "+0.0%", "+0.0%"),
        ("h1", "3", "0.500 ", "0.600*", "–", "0.960", "-16.7%", "+0.0%"),
    )


@pytest.mark.parametrize(
    ("ours", "output"),
    [
        (0.9, ()),
        (0.796, ()),
        (0.79, ("1%",)),
    ],
)  # fmt: skip
def test_the_sentence_tells_where_ours_is_behind_by_more_than_a_percent(
    ours: float, output: tuple[str, ...]
) -> None:
    groups = grouped(
        [
            *(*rows("adaptive", 0.9), *rows("dbs", 0.8)),
            *rows("adaptive", ours, scenario="h2", lag=3),
            *rows("dbs", 0.8, scenario="h2", lag=3),
        ]
    )

    check_message(comparison_sentence(groups), *output)


@pytest.mark.parametrize(
    ("ours", "output"),
    [
        (0.88, "10.0%"),
        (0.72, "10.0%"),
        (0.8004, "0.1%"),
    ],
)
def test_one_setting_is_reported_in_plain_words(ours: float, output: str) -> None:
    check_message(
        comparison_sentence(grouped([*rows("adaptive", ours), *rows("dbs", 0.8)])), output
    )


def test_settings_in_which_ours_is_level_are_counted_apart() -> None:
    some = [*rows("adaptive", 0.9), *rows("dbs", 0.8)]
    some += [*rows("adaptive", 0.8, scenario="h2"), *rows("dbs", 0.8, scenario="h2")]

    output = comparison_sentence(grouped(some))

    check_message(output, "0.1%")
