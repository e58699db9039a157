"""Tables and sentences of simulated runs, from rows made of numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenstride.report.compared import comparison_sentence, comparison_table, lead
from evenstride.report.simulated import grouped, simulation_sentence, simulation_table
from evenstride.sim.score import Row

ROW = Row(
    *("h1", "adaptive", 1, 0),
    efficiency=0.9,
    efficiency_mean=0.8,
    informed=0.96,
    efficiency_settled=0.99,
    speedup=1.5,
    bound=2.0,
    linear_bound=2.2,
    steps_to_95_cold=3,
    steps_to_95_after_change=5,
    needless_changes=2,
    decide_s=0.00125,
)


def rows(policy: str, *means: float, scenario: str = "h1", lag: int = 1) -> list[Row]:
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
        *("h1", "adaptive", "1", "0.833", "0.800", "0.960", "0.990"),
        *("3 / 9", "5 / never", "3.0", "1.25 ms", "1.50", "2.00", "2.20"),
    )


def test_what_is_not_known_is_a_dash() -> None:
    unsettled = replace(ROW, efficiency_settled=None, steps_to_95_after_change=None)

    (line,) = simulation_table(grouped([unsettled], unjudged=[("h1", 1, 0)])).rows

    assert line[6] == "–"
    assert line[7:9] == ("3 / 3", "–")


def test_a_seed_in_which_nothing_changes_is_neither_slow_nor_quick_to_find_it_again() -> None:
    found = [None, 4, None, 8]
    seeds = [
        replace(ROW, seed=seed, steps_to_95_after_change=steps) for seed, steps in enumerate(found)
    ]

    def after(*unjudged: int) -> str:
        where = [("h1", 1, seed) for seed in unjudged] + [("h1", 2, 2), ("h2", 1, 2)]
        (line,) = simulation_table(grouped(seeds, where)).rows
        return line[8]

    assert after(0, 2) == "4 / 8"
    assert after(0) == "8 / never"
    assert after() == "8 / never"
    assert after(0, 1, 2, 3) == "–"


def test_a_single_run_is_told_by_how_much_longer_it_takes() -> None:
    assert simulation_sentence(grouped([ROW])) == (
        "In h1 at lag 1, adaptive is at 0.800: its steps take 25.0% longer than those of the best "
        "split at every moment, with equal batches they would take 100.0% longer, and with a "
        "controller that is told the truth 4.2%."
    )


def test_of_several_policies_the_best_is_told() -> None:
    told = simulation_sentence(grouped([*rows("dbs", 0.7, 0.9), *rows("adaptive", 0.9, 0.8)]))

    assert told.startswith("In h1 at lag 1, adaptive is the best: its steps take 17.6% longer")


def test_of_several_settings_it_is_told_who_is_best_in_how_many() -> None:
    told = simulation_sentence(
        grouped(
            [
                *(*rows("dbs", 0.7), *rows("adaptive", 0.9)),
                *(*rows("dbs", 0.9, lag=3), *rows("adaptive", 0.7, lag=3)),
                *(*rows("dbs", 0.7, scenario="h2"), *rows("adaptive", 0.9, scenario="h2")),
            ]
        )
    )

    assert told == "Of 3 settings, the best policy is adaptive in 2, dbs in 1."


def test_of_one_policy_in_several_settings_the_weakest_is_told() -> None:
    told = simulation_sentence(grouped([*rows("dbs", 0.9), *rows("dbs", 0.6, scenario="h2")]))

    assert told.startswith("The furthest from the best possible is this: In h2 at lag 1, dbs is at")


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
def test_nobody_leads_without_ours_or_without_others(policies: list[str]) -> None:
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
        "adaptive against\nthe best other",
    )
    assert table.rows == (
        ("h1", "1", "0.900*", "0.800 ", "0.900*", "0.960", "+0.0%"),
        ("h1", "3", "0.500 ", "0.600*", "–", "0.960", "-16.7%"),
    )


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        (0.9, "adaptive is ahead of every other policy in 2 of 2 settings, and nowhere behind"),
        (0.796, "adaptive is ahead of every other policy in 1 of 2 settings, and nowhere behind"),
        (0.79, "adaptive is ahead of every other policy in 1 of 2 settings, and behind the best "
               "of them by more than 1% in h2 at lag 3."),
    ],
)  # fmt: skip
def test_the_sentence_tells_where_ours_is_behind_by_more_than_a_percent(
    ours: float, told: str
) -> None:
    groups = grouped(
        [
            *(*rows("adaptive", 0.9), *rows("dbs", 0.8)),
            *rows("adaptive", ours, scenario="h2", lag=3),
            *rows("dbs", 0.8, scenario="h2", lag=3),
        ]
    )

    assert comparison_sentence(groups).startswith(told)
