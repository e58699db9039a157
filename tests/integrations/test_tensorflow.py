"""TensorFlow: unequal batches, with and without a strategy, come to what one process does."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from tests.ending import end, run_to_end
from tests.free_ports import free_ports
from tests.messages import check_message
from tests.multiproc.training import relative_error

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

from tests.integrations.tensorflow_facts import BATCH, CUT_AFTER, EPOCHS, FACTS, SAMPLES, SHARES

ROOT = Path(__file__).parents[2]
DEADLINE_S = 400.0  # TensorFlow starts slowly on a busy machine
TORCHRUN = ("torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
FLOAT64, FLOAT32 = 1e-12, 1e-6
STEPS_IN_EPOCH = -(-SAMPLES // BATCH)
IN_FLOAT64 = ("by hand", "eager", "strategy", "eager strategy")


def run(*module: str) -> str:
    """Run a module to its end; return its output."""
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**QUIET, "PYTHONPATH": paths}
    code, output = run_to_end([sys.executable, "-m", *module], DEADLINE_S, environment, cwd=ROOT)
    assert code == 0, output[-4000:]
    return output


def local(folder: Path, workers: int, what: str) -> list[dict[str, Any]]:
    program = ("-m", "tests.integrations.tensorflow_local", str(folder), what)
    run(*TORCHRUN, f"--nproc-per-node={workers}", *program)
    return [json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in range(workers)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensorflow")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    """Return what each of two workers came to."""
    return local(folder, 2, "whole")


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("loop", IN_FLOAT64)
def test_the_gradient_of_each_step_is_that_of_one_process(
    two: list[dict[str, Any]], loop: str
) -> None:
    for worker in two:
        alone, came = worker["alone"], worker[loop]
        for found, gradient in zip(came["gradients"], alone["gradients"], strict=True):
            assert relative_error(found, gradient) < FLOAT64
        assert relative_error(came["weights"], alone["weights"]) < FLOAT64
        assert came["loss"] == pytest.approx(alone["loss"], rel=FLOAT64)


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("loop", ["float32", "float32 strategy"])
def test_in_float32_too(two: list[dict[str, Any]], loop: str) -> None:
    for worker in two:
        alone = worker["alone float32"]
        for found, gradient in zip(worker[loop]["gradients"], alone["gradients"], strict=True):
            assert relative_error(found, gradient) < FLOAT32
        assert relative_error(worker[loop]["weights"], alone["weights"]) < FLOAT32


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(
    ("loop", "alone"),
    [("kept", "alone"), ("kept strategy", "alone"), ("sum strategy", "alone sum")],
)
def test_a_loop_of_which_only_the_optimizer_is_watched(
    two: list[dict[str, Any]], loop: str, alone: str
) -> None:
    """It clips by the global batch, and is traced for no batch size but the first."""
    for worker, share in zip(two, SHARES, strict=True):
        came = worker[loop]
        assert relative_error(came["weights"], worker[alone]["weights"]) < FLOAT64
        assert len(came["trained"][0]) == share
        assert came["shares"] == list(SHARES)
        assert came["length"] == STEPS_IN_EPOCH
        assert came["traces"] <= 2  # TensorFlow itself traces the first call twice
    trained = Counter(i for worker in two for ids in worker[loop]["trained"] for i in ids)
    assert trained == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    metrics = [worker[loop]["metric"] for worker in two]
    assert metrics[0] == metrics[1] == pytest.approx(two[0]["kept"]["metric"], rel=0.01)


@pytest.mark.timeout(DEADLINE_S + 60)
def test_the_same_batches_without_evenstride_give_a_wrong_gradient(
    two: list[dict[str, Any]],
) -> None:
    for worker in two:
        assert relative_error(worker["uneven"], worker["alone"]["gradients"][0]) > 0.1


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_tf_data_pipeline_is_split(two: list[dict[str, Any]]) -> None:
    first, second = (worker["streamed"] for worker in two)
    assert Counter(first["trained"] + second["trained"]) == Counter(
        dict.fromkeys(range(SAMPLES), EPOCHS)
    )
    assert len(first["trained"]) < len(second["trained"])
    assert sorted(first["mixed"] + second["mixed"]) == list(range(SAMPLES))
    assert first["spec"] == [[None], [None, 5], [None, 1]]


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_scaled_loss_that_overflows_on_one_worker_is_skipped_by_all(
    two: list[dict[str, Any]],
) -> None:
    for worker in two:
        assert worker["scaled"]["iterations"] == [1, 1, 2, 3, 4]
        assert worker["scaled"]["scale"] == 512.0
        assert worker["scaled"]["weights"] == two[0]["scaled"]["weights"]
        assert worker["scaled"]["moved"]
        in_strategy = worker["scaled strategy"]
        assert in_strategy["iterations"] == worker["scaled"]["iterations"]
        assert relative_error(in_strategy["weights"], worker["scaled"]["weights"]) <= 1e-3


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("loop", ["sparse", "sparse strategy"])
def test_a_sparse_gradient_is_summed(two: list[dict[str, Any]], loop: str) -> None:
    for worker in two:
        assert Counter(round(one, 6) for one in worker[loop]) == {0.9: 2 * BATCH, 1.0: 2 * 34}


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_worker_without_samples_adds_zeros(two: list[dict[str, Any]]) -> None:
    assert [worker["placeholder"] for worker in two] == [[0.0, 0.0, 0.0]] * 2


@pytest.mark.timeout(DEADLINE_S + 60)
def test_an_evaluation_has_each_sample_once(two: list[dict[str, Any]]) -> None:
    first, second = (worker["evaluated"] for worker in two)
    assert sorted(first["ids"] + second["ids"]) == list(range(SAMPLES))
    parts = [worker["kept"] * len(worker["ids"]) for worker in (first, second)]
    assert first["result"] == second["result"] == pytest.approx(sum(parts) / SAMPLES, rel=1e-12)


@pytest.mark.timeout(DEADLINE_S + 60)
def test_an_optimizer_may_train_again(two: list[dict[str, Any]]) -> None:
    assert all(worker["repeated"] == [ceil(SAMPLES / BATCH)] * 2 for worker in two)


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("case", FACTS)
def test_what_cannot_be_exact_is_refused_alike_on_every_worker(
    two: list[dict[str, Any]], case: str
) -> None:
    first, second = (worker["refusals"][case] for worker in two)
    assert first == second
    assert first.partition(":")[0] in ("ConfigError", "UsageError")
    check_message(first, *FACTS[case])


@pytest.mark.timeout(2 * DEADLINE_S + 60)
def test_a_run_continues_within_an_epoch_on_another_number_of_workers(
    two: list[dict[str, Any]], folder: Path
) -> None:
    three = local(folder, 3, "rest")

    trained = [ids for worker in two for ids in worker["kept"]["trained"][:CUT_AFTER]]
    for worker in three:
        assert worker["begun"] == [CUT_AFTER // STEPS_IN_EPOCH, CUT_AFTER]
        assert relative_error(worker["weights"], two[0]["alone"]["weights"]) < FLOAT64
        trained += worker["trained"]
    assert Counter(i for ids in trained for i in ids) == Counter(
        dict.fromkeys(range(SAMPLES), EPOCHS)
    )


@pytest.mark.timeout(2 * DEADLINE_S + 60)
def test_the_example_continues_under_a_launcher_that_sets_tf_config(tmp_path: Path) -> None:
    """It is saved by one process, and resumed by two of the strategy without torchrun."""
    example = ("examples/tensorflow_loop.py", "--checkpoint", str(tmp_path))
    command = (*TORCHRUN, "--nproc-per-node=1", *example, "--epochs=1", "--save-every=2")
    one = run(*command)
    assert "epoch 1: accuracy 0." in one

    ports = free_ports(3)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports[:2]]}
    common = {**os.environ, **QUIET, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(ports[2])}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT / "src")}
    processes = [
        subprocess.Popen(
            [sys.executable, *example, "--strategy", "--epochs=2"],
            cwd=ROOT,
            env={
                **common,
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": "worker", "index": index}}
                ),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for index in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            end(process, grace_s=1.0)
    assert [process.returncode for process in processes] == [0, 0], outputs[0][-4000:]
    assert "epoch 1: accuracy 0." in outputs[0], "the save came before the end of the epoch"
    assert "\n4 steps of 512 samples on 2 worker(s)" in outputs[0]
