"""`EvenAccelerator` trains as one process does, in scripts that are written for `Accelerator`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

from evenstride.testing import RankPool
from tests.integrations import accelerate_programs as programs
from tests.integrations import accelerate_states as states
from tests.integrations.accelerate_programs import BATCH, EPOCHS, SAMPLES
from tests.integrations.accelerate_states import CUT, WHOLE
from tests.messages import check_message
from tests.multiproc.training import relative_error

ONCE = Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


@pytest.fixture(scope="module")
def trained(ranks: RankPool) -> list[dict[str, Any]]:
    """Return what came of every script of `programs.training`, on each rank."""
    return ranks.run(programs.training, 2, timeout_s=100.0)


@pytest.fixture(scope="module")
def cut(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Save two states in the midst of an epoch, and train to the end without a break."""
    folder = tmp_path_factory.mktemp("saved")
    found = ranks.run(states.cut_and_whole, 2, str(folder), timeout_s=100.0)
    return {"folder": folder, "ranks": found}


def loaded(runs: Iterable[dict[str, Any]]) -> Counter[int]:
    """Return how often each sample was loaded."""
    return Counter(index for run in runs for index in run["loaded"])


def check_exact(run: dict[str, Any], alone: dict[str, Any], most: float = 1e-12) -> None:
    """Fail unless gradients and weights are those of one process."""
    assert len(run["gradients"]) == len(alone["gradients"])
    for actual, expected in zip(run["gradients"], alone["gradients"], strict=True):
        assert relative_error(actual, expected) <= most
    assert relative_error(run["weights"], alone["weights"]) <= most


@pytest.mark.parametrize("name", ["even", "even of 3", "of 7", "by hand", "split"])
def test_every_gradient_is_that_of_one_process(trained: list[dict[str, Any]], name: str) -> None:
    for found in trained:
        check_exact(found[name], found[name]["alone"])


def test_in_float32_too(trained: list[dict[str, Any]]) -> None:
    for found in trained:
        check_exact(found["float32"], found["float32"]["alone"], most=1e-6)


def test_without_weights_the_same_batches_give_a_wrong_gradient(
    trained: list[dict[str, Any]],
) -> None:
    assert trained[0]["wrong"]["error"] > 0.3


@pytest.mark.parametrize("name", ["even", "even of 3"])
def test_batches_are_unequal_and_each_sample_comes_once(
    trained: list[dict[str, Any]], name: str
) -> None:
    fewer, more = (found[name] for found in trained)

    assert len(fewer["loaded"]) < 0.5 * len(more["loaded"])
    assert loaded([fewer, more]) == ONCE
    assert max(more["sizes"]) > BATCH > max(fewer["sizes"])


@pytest.mark.parametrize("name", ["", " of 3"])
def test_counters_and_schedules_are_those_of_accelerate(
    trained: list[dict[str, Any]], name: str
) -> None:
    for found in trained:
        plain, even = found[f"plain{name}" if name else "plain"], found[f"even{name}"]
        assert even["length"] == plain["length"]
        assert even["numbers"] == plain["numbers"] == [even["length"]] * EPOCHS
        assert even["rates"] == pytest.approx(plain["rates"], rel=1e-15)
    assert len(set(trained[0]["even"]["rates"])) > 4, "the rate changes"


def test_what_a_loop_gathers_of_each_batch_is_alike_on_all_ranks(
    trained: list[dict[str, Any]],
) -> None:
    first, second = trained

    assert first["even of 3"]["logged"] == second["even of 3"]["logged"]


def test_a_mean_over_tokens_is_weighted_by_tokens(trained: list[dict[str, Any]]) -> None:
    assert trained[0]["tokens"]["error"] <= 1e-12


def test_batch_norm_may_be_over_the_samples_of_all_processes(
    trained: list[dict[str, Any]],
) -> None:
    assert trained[0]["norm"]["error"] <= 1e-12


def test_modes_without_an_engine_train_a_plain_model(trained: list[dict[str, Any]]) -> None:
    first, second = (found["local"] for found in trained)

    assert first["gradients"] != second["gradients"], "each process steps by itself"
    assert first["weights"] == second["weights"], "after the average at the end of an epoch"
    assert loaded([first, second]) == ONCE


def test_bfloat16_trains(trained: list[dict[str, Any]]) -> None:
    for found in trained:
        assert 1e-6 < relative_error(found["bf16"]["weights"], found["float32"]["weights"]) < 0.05


def test_a_pass_that_is_left_is_followed_by_a_new_epoch(trained: list[dict[str, Any]]) -> None:
    (first, of_first), (second, of_second) = trained[0]["again"]["passes"]

    assert (of_first, of_second) == (0, 1)
    assert first != second


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_state_of_mid_epoch_resumes_with_any_number_of_processes(
    ranks: RankPool, cut: dict[str, Any], world_size: int
) -> None:
    folder = Path(cut["folder"], f"after {CUT[world_size]}")
    rest = ranks.run(
        states.resumed, world_size, str(folder), CUT[world_size], world_size, timeout_s=100.0
    )

    whole = cut["ranks"]
    for found in rest:
        assert relative_error(found["weights"], whole[0]["whole"]["weights"]) <= 1e-12
        assert found["rates"] == pytest.approx(whole[0]["whole"]["rates"][CUT[world_size] :])
    before = loaded(found[str(CUT[world_size])] for found in whole)
    assert before + loaded(rest) == ONCE
    assert before.total() % SAMPLES > 0, "in the midst of an epoch"
    for found in rest:
        check_message(found["unfixed"], "ConfigError", f"global_batch={WHOLE}")


def test_a_state_between_backward_and_step_is_refused(cut: dict[str, Any]) -> None:
    for found in cut["ranks"]:
        check_message(found["mid-update"], "StepInFlight", varies=["step 0"])


def test_metrics_count_each_sample_once(ranks: RankPool) -> None:
    everywhere = ranks.run(states.evaluating, 2)

    for evaluations in everywhere:
        for name, found in evaluations.items():
            size = int(name.split()[0])
            assert found["ids"] == list(range(size)), name
            assert found["texts"] == [str(i) for i in range(size)], name
            assert found["numbers"] == found["length"], name
            assert found["ends"] == [False] * (found["length"] - 1) + [True], name
            assert found["gathered"] == [0, 0, 1], name
            assert sorted(found["other"]) == sorted(set(found["other"])), name
    assert {1, 2} == {
        rows for found in everywhere for found in found.values() for rows in found["sizes"]
    }


def test_what_needs_equal_processes_is_refused_alike(ranks: RankPool) -> None:
    first, second = ranks.run(states.set_up, 2)

    assert first == second
    check_message(first["local"], "ConfigError", "LocalSGD", "local-sgd(every=8)")
    check_message(first["retried"], "ConfigError", "find_executable_batch_size", "max_share")
    check_message(first["FSDP1"], "ConfigError", "fsdp_version=2")


def test_fsdp_version_2_trains_and_resumes(ranks: RankPool, tmp_path: Path) -> None:
    everywhere = ranks.run(states.fully_sharded, 2, str(tmp_path), timeout_s=100.0)

    for found in everywhere:
        check_exact(found["whole"], found["alone"])
        assert relative_error(found["rest"]["weights"], found["whole"]["weights"]) <= 1e-12
        assert found["rest"]["rates"] == found["whole"]["rates"][len(found["cut"]["rates"]) :]
    assert loaded(found[part] for found in everywhere for part in ("cut", "rest")) == ONCE


def test_the_example_differs_from_accelerate_in_two_lines_and_trains_alike(
    ranks: RankPool, tmp_path: Path
) -> None:
    accelerate_loop = pytest.importorskip("examples.accelerate_loop", exc_type=ImportError)
    everywhere = ranks.run(states.example, 2, str(tmp_path), 2, timeout_s=100.0)
    alone = ranks.run(states.example, 1, str(tmp_path), 1)[0]

    for found in everywhere:
        assert relative_error(found["whole"]["weights"], alone["whole"]["weights"]) <= 1e-9
        assert relative_error(found["rest"]["weights"], alone["whole"]["weights"]) <= 1e-9
    found = everywhere[0]
    counts = [re.sub(r"\d+ of", "of", line) for line in found["plain"]["lines"]]
    assert counts == ["epoch 1: of 297 digits right", "epoch 2: of 297 digits right"]
    assert found["whole"]["lines"] == alone["whole"]["lines"]
    assert found["rest"]["lines"] == alone["whole"]["lines"][1:]
    code = Path(accelerate_loop.__file__).read_text().rpartition('"""\n\nimport')[2]
    assert len(re.findall(r"# \d: ", code)) == 2
