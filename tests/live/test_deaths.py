"""Workers that die, come back and drop steps, as real processes under torchft's Lighthouse."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from tests.live.fleet import Fleet, Line, fleet_of, kept, trained
from tests.live.training import reference

pytest.importorskip("torchft", reason="torchft is not installed (it has wheels for Linux x86-64)")

pytestmark = pytest.mark.timeout(300)

DIES_AT = 7


def check_trajectory(fleet: Fleet, survivors: str, epochs: int) -> None:
    """Check that samples, weights and optimizer states are those of one process."""
    steps, weights = reference(epochs)
    atol = 1e-12 if epochs < 10 else 1e-6  # rounding grows with the steps
    lines = fleet.diary()
    assert trained(lines) == {step: sorted(ids) for step, ids in enumerate(steps)}
    texts = [json.loads((fleet.folder / f"{name}.weights.json").read_text()) for name in survivors]
    for have, _ in texts:
        for name, expected in weights.items():
            torch.testing.assert_close(
                torch.tensor(have[name], dtype=torch.float64), expected, rtol=0, atol=atol
            )
    assert all(one == texts[0] for one in texts), "workers end with equal weights and momenta"


def of(lines: list[Line], name: str, kind: str, step: int) -> list[Line]:
    return [x for x in lines if (x["worker"], x["kind"], x.get("step")) == (name, kind, step)]


@pytest.mark.parametrize(
    ("dies", "plans"),
    [
        pytest.param("c", {}, id="a follower"),
        pytest.param("a", {"b": {"micro": 3}}, id="the leader, the others with micro-batches"),
        pytest.param("b", {"c": {"processes": 1}}, id="one of those who load in processes"),
    ],
)
def test_a_step_in_which_a_worker_dies_comes_again(
    tmp_path: Path, dies: str, plans: dict[str, dict[str, object]]
) -> None:
    survivors = "abc".replace(dies, "")
    with fleet_of(tmp_path) as fleet:
        texts = {name: dict(plans.get(name, {})) for name in "abc"}
        texts[dies] |= {"step": DIES_AT, "what": "dies"}
        fleet.start(texts)
        codes = fleet.wait()

    assert codes == {**dict.fromkeys(survivors, 0), dies: -9}
    assert not multiprocessing.active_children()
    check_trajectory(fleet, survivors, epochs=3)
    lines = fleet.diary()
    for name in survivors:
        assert [line["kept"] for line in of(lines, name, "voted", DIES_AT)] == [False, True]
        assert len(of(lines, name, "drew", DIES_AT)[-1]["workers"]) == 2
    assert kept(lines)[DIES_AT] > kept(lines)[DIES_AT - 1]


def test_a_worker_that_dies_after_its_part_is_done_does_not_undo_the_step(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as fleet:
        fleet.start({"a": {}, "b": {"step": DIES_AT, "what": "dies late"}, "c": {}})
        codes = fleet.wait()

    assert codes == {"a": 0, "b": -9, "c": 0}
    check_trajectory(fleet, "ac", epochs=3)
    assert [x["kept"] for x in of(fleet.diary(), "a", "voted", DIES_AT)] == [True]


def test_a_worker_that_dies_and_comes_back_gets_samples_once_it_has_the_weights(
    tmp_path: Path,
) -> None:
    epochs = 60
    with fleet_of(tmp_path) as fleet:
        plan = {"epochs": epochs}
        fleet.start({"a": plan, "b": plan | {"step": DIES_AT, "what": "dies"}, "c": plan})
        fleet.until(lambda lines: bool(of(lines, "a", "voted", DIES_AT + 2)))
        fleet.start_again("b", **plan)
        codes = fleet.wait()

    assert codes == {"a": 0, "b": 0, "c": 0}
    check_trajectory(fleet, "abc", epochs)
    drew = [x for x in fleet.diary() if (x["worker"], x["kind"]) == ("b", "drew")]
    back = [x for x in drew if x["step"] > DIES_AT]
    assert back[0]["ids"] == []
    assert len(back[0]["workers"]) == 3
    assert back[1]["ids"]
    assert back[1]["generation"] == back[0]["generation"] + 1


def test_a_step_that_one_worker_drops_alone_is_taken_over_from_the_others(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as fleet:
        fleet.start({"a": {"step": DIES_AT, "what": "drops"}, "b": {}, "c": {}})
        codes = fleet.wait()

    assert codes == {"a": 0, "b": 0, "c": 0}
    check_trajectory(fleet, "abc", epochs=3)
    lines = fleet.diary()
    assert [x["kept"] for x in of(lines, "a", "voted", DIES_AT)] == [False]
    assert [x["kept"] for x in of(lines, "b", "voted", DIES_AT)] == [True]
    (late,) = of(lines, "a", "drew", DIES_AT + 1)
    assert late["ids"] == []


def test_a_newcomer_with_other_settings_ends_and_the_others_do_not(tmp_path: Path) -> None:
    epochs = 60
    with fleet_of(tmp_path) as fleet:
        fleet.start({"a": {"epochs": epochs}, "b": {"epochs": epochs}})
        fleet.until(lambda lines: bool(of(lines, "a", "voted", DIES_AT)))
        fleet.start_again("c", policy="uniform", epochs=epochs)
        codes = fleet.wait()

    assert codes == {"a": 0, "b": 0, "c": 1}
    check_trajectory(fleet, "ab", epochs)
    assert not [x for x in fleet.diary() if (x["worker"], x["kind"]) == ("c", "voted")]


def test_a_newcomer_knows_its_position_though_another_died_as_they_met(tmp_path: Path) -> None:
    epochs = 60
    with fleet_of(tmp_path) as fleet:
        fleet.start({"a": {"epochs": epochs}, "b": {"epochs": epochs, "what": "dies meeting"}})
        fleet.until(lambda lines: bool(of(lines, "a", "voted", DIES_AT)))
        fleet.start_again("c", epochs=epochs)
        codes = fleet.wait()

    assert codes == {"a": 0, "b": -9, "c": 0}
    check_trajectory(fleet, "ac", epochs)


def test_no_worker_waits_for_one_that_has_given_up_a_step(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as fleet:
        fleet.start({"a": {}, "b": {"step": DIES_AT, "what": "fails"}, "c": {}})
        codes = fleet.wait()

    assert codes == {"a": 0, "b": 0, "c": 0}
    check_trajectory(fleet, "abc", epochs=3)
    for name in "abc":
        assert [x["kept"] for x in of(fleet.diary(), name, "voted", DIES_AT)] == [False, True]


def test_a_saved_state_is_gone_on_from(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as fleet:
        fleet.start({"a": {"step": 12, "what": "restores"}})
        codes = fleet.wait()

    assert codes == {"a": 0}
    check_trajectory(fleet, "a", epochs=3)
