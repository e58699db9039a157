"""What is wrong with the YAML of a scenario, whatever is in it, is reported with line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.sim.scenario.scenario_file import DEEPEST, load_scenario
from tests.messages import check_message
from tests.unit.sim.scenario.test_scenario_file import GOOD, refusal

A_NAME = "(allowed: one line of printable characters)"


@pytest.fixture
def reported(tmp_path: Path) -> Path:
    """The file that tests write."""
    return tmp_path / "made.yaml"


@pytest.mark.parametrize("tag", ["!!bool", "!!int", "!!timestamp", "!!str", "!!binary", "!", "!my"])
@pytest.mark.parametrize("value", ["64", "yes", "''", "[a]", "{a: 5}"])
def test_a_value_with_a_tag_is_refused(reported: Path, tag: str, value: str) -> None:
    said = refusal(reported, GOOD.replace("batch: 64", f"batch: {tag} {value}"))

    check_message(said, "made.yaml", "global_batch", f"{tag!r}")


def test_a_nested_tag_is_refused_with_its_field(reported: Path) -> None:
    said = refusal(reported, GOOD.replace("50", "!!float 50"))

    check_message(said, "made.yaml", "workers[1].samples_per_s", "'!!float'")


@pytest.mark.parametrize("key", ["[a]", "{a: b}", "!!str [a]", "- a"])
def test_a_key_that_is_no_scalar_is_refused(reported: Path, key: str) -> None:
    said = refusal(reported, f"{GOOD}? {key}\n: 3\n")

    check_message(said, "made.yaml")


def test_a_key_that_stands_for_a_list_is_refused(reported: Path) -> None:
    said = refusal(reported, f"{GOOD}about: &a [x]\n? *a\n: 3\n")

    check_message(said)


@pytest.mark.parametrize("key", [r'"a\nb"', r'"a\eb"', r'"\ud800"', "x" * 201])
def test_a_key_that_cannot_be_shown_in_one_line_is_no_name(reported: Path, key: str) -> None:
    said = refusal(reported, f"{GOOD}{key}: 3\n")

    assert said.startswith("made.yaml:7: '")
    check_message(said)
    assert said.isprintable()
    assert len(said) < 160


@pytest.mark.parametrize("sign", ["", "+", "-"])
def test_a_number_of_very_many_digits_is_out_of_range_like_any_other(
    reported: Path, sign: str
) -> None:
    said = refusal(reported, GOOD.replace("batch: 64", f"batch: {sign}{'9_9' * 5000}"))

    check_message(said, "made.yaml", "global_batch", sign.strip("+"))


@pytest.mark.parametrize("character", ["\0", "\x07", "\x1b", "\x7f", "\ufffe"])
def test_a_character_that_yaml_forbids_is_refused_with_its_line(
    reported: Path, character: str
) -> None:
    said = refusal(reported, f"{GOOD}about: it{character}is\n")

    check_message(said, "made.yaml", f"{ord(character):04X}")


@pytest.mark.parametrize("escape", [r"\U00110000", r"\UFFFFFFFF"])
def test_an_invalid_escape_is_refused_with_its_line(reported: Path, escape: str) -> None:
    said = refusal(reported, f'{GOOD}about: "{escape}"\n')

    check_message(said, "made.yaml")


def test_a_thousands_separator_within_braces_is_explained(reported: Path) -> None:
    said = refusal(reported, GOOD.replace("50,", "2,000,"))

    check_message(said, "made.yaml", "'000'")
    assert "no thousands separators" in said


@pytest.mark.parametrize(
    ("old", "new"),
    [("batch: 64", "batch: '64'"), ("50,", '"1e3",'), ("50,", "50, noise: true,")],
)
def test_a_number_in_quotes_is_a_text(reported: Path, old: str, new: str) -> None:
    check_message(refusal(reported, GOOD.replace(old, new)))


def test_a_whole_number_may_be_written_as_any_number(reported: Path) -> None:
    exchange = "exchange: {lag: 3.0, every: 5e0}\n"
    events = "events: [{kind: leave, at: 0.3e1, workers: 0.0}]\n"
    reported.write_text(GOOD.replace("steps: 100", "steps: 1e2") + exchange + events)

    made = load_scenario(reported)

    assert (made.steps, made.exchange.lag, made.exchange.every) == (100, 3, 5)
    assert (made.events[0].at, made.events[0].workers) == (3, 0)


def bomb(levels: int, width: int) -> str:
    """Return lists, each of the one before several times."""
    lists = [f"&a0 [{', '.join('x' * width)}]"]
    lists += [f"&a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return f"[{', '.join(lists)}]"


@pytest.mark.parametrize(
    "where",
    [
        "about: {}\n",
        "exchange: {{every: {}}}\n",
        "events: {}\n",
        "events: [{{kind: {}, at: 3}}]\n",
        "events: [{{kind: leave, at: 3, workers: {}}}]\n",
    ],
)
def test_a_few_lines_cannot_stand_for_billions_of_values(reported: Path, where: str) -> None:
    for levels, width, text in ((30, 2, "nested too deep"), (7, 20, "repeat too many values")):
        said = refusal(reported, GOOD + where.format(bomb(levels, width)))

        assert said.startswith("made.yaml:7: ")
        assert text in said
        assert len(said) < 120


@pytest.mark.parametrize("where", ["about: {}\n", "events: [{{kind: {}, at: 3}}]\n"])
def test_of_a_large_value_only_a_little_is_shown(reported: Path, where: str) -> None:
    said = refusal(reported, GOOD + where.format(bomb(4, 12)))

    assert said.startswith("made.yaml:7: ")
    assert len(said) < 300


def test_merging_cannot_stand_for_billions_of_values_either(reported: Path) -> None:
    doubled = "".join(f"k{n}: &k{n} {{<<: [*k{n - 1}, *k{n - 1}]}}\n" for n in range(1, 60))
    wider = "".join(f"k{n}: &k{n} {{<<: [{f'*k{n - 1}, ' * 20}]}}\n" for n in range(1, 9))
    many = ", ".join(f"x{n}: 1" for n in range(400))
    often = f"k1: &k1 {{{many}}}\nk2: {{<<: [{'*k1, ' * 400}]}}\n"

    for more in (doubled, wider, often):
        said = refusal(reported, f"{GOOD}k0: &k0 {{a: 1}}\n{more}")
        assert (
            "merges a value without fields, or too deeply" in said
            or "* and << repeat too many values" in said
        )


@pytest.mark.parametrize("opening", ["[", "{a: ", "[{a: "])
def test_very_deep_nesting_is_refused_with_its_line(reported: Path, opening: str) -> None:
    said = refusal(reported, f"{GOOD}about: {opening * 5000}\n")

    check_message(said, "made.yaml", DEEPEST)


def test_a_wrong_merged_value_is_refused_with_its_own_line(reported: Path) -> None:
    merged = GOOD.replace("global_batch: 64", "<<: {global_batch: -3}")

    assert refusal(reported, merged).startswith("made.yaml:2: global_batch: -3 ")


def test_a_wrong_value_of_an_alias_is_refused_with_the_line_of_its_anchor(reported: Path) -> None:
    wrong = GOOD.replace("- {name: x,", "- &x {name: x,").replace("100}", "-100}")

    said = refusal(reported, f"{wrong}  - *x\n  - {{<<: *x, count: 0}}\n").splitlines()

    assert [line.rpartition(" (Input")[0] for line in said] == [
        "made.yaml:5: workers[0].samples_per_s: -100",
        "made.yaml:5: workers[2].samples_per_s: -100",
        "made.yaml:8: workers[3].count: 0",
        "made.yaml:5: workers[3].samples_per_s: -100",
    ]


def test_merged_values_yield_to_written_ones_and_to_earlier_merges(
    reported: Path,
) -> None:
    first, second = "&a {count: 2, noise: 0.1}", "&b {count: 3, noise: 0.2, floor_s: 1}"
    groups = f"  - {{<<: [{first}, {second}], noise: 0.3, samples_per_s: 9}}\n"
    reported.write_text(f"{GOOD}{groups}  - {{samples_per_s: 5, <<: *b}}\n")

    *_, both, one = load_scenario(reported).workers

    assert (both.count, both.noise, both.floor_s, both.samples_per_s) == (2, 0.3, 1.0, 9.0)
    assert (one.count, one.noise, one.floor_s, one.samples_per_s) == (3, 0.2, 1.0, 5.0)


MERGES = [
    ("about: {<<: 3}\n", "about: << merges a value without fields"),
    ("about: {<<: [{a: 3}, x]}\n", "about: << merges a value without fields"),
    ("about: &a {<<: *a}\n", "about: << merges a value without fields, or too deeply"),
    ("about: {<<: {a: 3}, <<: {b: 3}}\n", "about: '<<' is given twice (allowed: once)"),
    ("'<<': {a: 3}\n", "<<: unknown field"),
]


@pytest.mark.parametrize(("more", "text"), MERGES, ids=[more for more, _ in MERGES])
def test_an_invalid_merge_is_refused(reported: Path, more: str, text: str) -> None:
    assert refusal(reported, GOOD + more).startswith(f"made.yaml:7: {text}")


@pytest.mark.parametrize("name", [r'"a\nb"', r'"a\tb"', r'"\e[31mred"', r'"\u2028"', r'"\0"'])
def test_a_name_that_would_break_a_table_is_refused(reported: Path, name: str) -> None:
    scenario = refusal(reported, GOOD.replace("good", name))
    group = refusal(reported, GOOD.replace("name: y", f"name: {name}"))

    for said, where in (
        (scenario, "made.yaml:1: name: '"),
        (group, "made.yaml:6: workers[1].name"),
    ):
        assert said.startswith(where)
        assert said.endswith(A_NAME)
        assert said.isprintable()


def test_a_name_may_be_in_any_language(reported: Path) -> None:
    reported.write_text(GOOD.replace("good", "schöne neue 世界"), encoding="utf-8")

    assert load_scenario(reported).name == "schöne neue 世界"
