"""The examples, run as a user runs them, on small input of the formats they read."""

from __future__ import annotations

import gzip
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.ending import run_to_end

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 100.0
pytestmark = pytest.mark.timeout(310)  # most tests run two or three examples in turn
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")


def _end(
    name: str, *arguments: object, split: Sequence[int] = (), max_steps: int | None = None
) -> tuple[int, str]:
    """Return an example's exit code and output, with one worker under torchrun for each share.

    The shares are fixed: repeatable, and so unequal that an error in the weights shows. Without
    any the example runs under plain python.
    """
    launcher = (*TORCHRUN, f"--nproc-per-node={len(split)}") if split else ()
    environment = {
        "RES_OPTIONS": "timeout:1 attempts:1",
        "EVENSTRIDE_DATA": "nowhere",
        "EVENSTRIDE_POLICY": "static:" + ",".join(map(str, split)) if split else "",
        "EVENSTRIDE_MAX_STEPS": "" if max_steps is None else str(max_steps),
    }
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    return run_to_end(command, DEADLINE_S, environment)


def _run(
    name: str, *arguments: object, split: Sequence[int] = (), max_steps: int | None = None
) -> str:
    """Return what an example prints, which must end well."""
    code, output = _end(name, *arguments, split=split, max_steps=max_steps)
    assert code == 0, output
    return output


def _after(words: str, output: str) -> list[float]:
    """Return every number that comes after the words."""
    return [float(number) for number in re.findall(rf"{words} (\d+(?:\.\d+)?)", output)]


def test_the_ddp_loop_learns_and_its_loss_does_not_depend_on_the_workers() -> None:
    small = ("--samples", 256, "--epochs", 30)

    two = _after("loss", _run("ddp", *small, split=(1024, 3072)))
    one = _after("loss", _run("ddp", *small, split=(4096,)))

    assert len(two) == 30  # one each epoch
    assert two[-1] < 0.5 * two[0]
    assert two == pytest.approx(one, abs=1.1e-3)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table with noise: 1000 rows, three features of unlike scale, the target last."""
    random = np.random.RandomState(0)
    features = random.randn(1000, 3) * [1.0, 10.0, 100.0] + [0.0, 5.0, -50.0]
    target = features @ [3.0, 0.2, -0.01] + 7.0 + random.randn(1000)
    path = tmp_path / "table.txt.gz"
    np.savetxt(path, np.column_stack([features, target]))
    return path


def test_linear_regression_gives_one_result_for_any_number_of_workers(table: Path) -> None:
    small = ("--table", table, "--epochs", 30)

    one = _run("linear_regression", *small)
    two = _run("linear_regression", *small, split=(56, 200))

    (rmse,), (least_squares,) = _after("RMSE", one), _after("reaches", one)
    assert _after("RMSE", two) == pytest.approx([rmse], abs=1.1e-9)
    assert least_squares == pytest.approx(1.0, rel=0.05), "the noise that the table was made with"
    assert rmse == pytest.approx(least_squares, rel=0.01)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Lines of 1 to 90 letters, some empty, easy to learn."""
    path = tmp_path / "text.txt"
    path.write_text("\n".join("abcdef"[: 1 + i % 6] * (i % 16) for i in range(60)))
    return path


def test_the_gpt_learns_and_its_loss_does_not_depend_on_the_workers(text: Path) -> None:
    size = ("--context", 32, "--width", 16, "--layers", 1, "--epochs", 3, "--log-every", 1)
    small = ("--text", text, *size, "--global-batch", 20, "--max-micro-batch", 4)

    two = _after("loss", _run("tiny_gpt", *small, split=(5, 15)))
    one = _after("loss", _run("tiny_gpt", *small, split=(20,)))

    assert two[-1] < two[0]
    assert two == pytest.approx(one, abs=1.1e-4)


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """A book of each author, with words that only this author uses among common ones."""
    random = np.random.RandomState(0)
    for name, own in (("austen-a", "ballroom letter"), ("melville-b", "whale harbour")):
        text = random.choice(f"the and of to {own}".split(), 400)
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(" ".join(text).encode()))
    return tmp_path


def test_the_svm_learns_and_its_loss_does_not_depend_on_the_workers(books: Path) -> None:
    small = ("--texts", books, "--words", 7, "--global-batch", 16, "--epochs", 20, "--lr", 5)

    two = _run("sparse_svm", *small, split=(3, 13))
    one = _run("sparse_svm", *small, split=(16,))

    assert _after("test loss", two) == pytest.approx(_after("test loss", one), abs=1.1e-4)
    assert _after("test loss", two)[-1] < 0.5
    assert _after("accuracy", two)[-1] > 90


@pytest.mark.parametrize("name", ["iterations", "stream"])
def test_the_gpt_without_a_data_set_learns_alike_with_any_workers(name: str, text: Path) -> None:
    size = ("--context", 16, "--width", 16, "--layers", 1, "--log-every", 1, "--global-batch", 20)
    more = ("--steps", 12) if name == "iterations" else ("--test", text, "--epochs", 2)

    two = _after("loss", _run(name, "--text", text, *size, *more, split=(5, 15)))
    one = _after("loss", _run(name, "--text", text, *size, *more, split=(20,)))

    assert two[-1] < two[0]
    assert two == pytest.approx(one, abs=1.1e-4)


def _idx(path: Path, array: npt.NDArray[np.uint8]) -> None:
    header = b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    """Images of 12 x 12, each class of a brightness of its own; 21 to learn and 17 to test."""
    random = np.random.RandomState(0)
    for part, count in (("train", 21), ("t10k", 17)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = 20 * labels[:, None, None] + random.randint(0, 40, (count, 12, 12))
        _idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images.astype(np.uint8))
        _idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
    return tmp_path


def _small(fashion: Path, *more: object) -> Sequence[object]:
    size = ("--width", 4, "--global-batch", 8, "--epochs", 2, "--num-workers", 1)
    return ("--data", fashion, *size, *more)


def test_the_resnet_resumes_in_mid_epoch_with_another_number_of_workers(fashion: Path) -> None:
    checkpoint = ("--checkpoint", fashion / "run.pt")

    whole = _run("fashion_resnet", *_small(fashion), split=(2, 6))
    cut = _run("fashion_resnet", *_small(fashion, *checkpoint), split=(2, 6), max_steps=4)
    rest = _run("fashion_resnet", *_small(fashion, *checkpoint), split=(8,))

    assert "resuming in epoch 1 after 4 steps" in rest
    assert "2 steps of 8 samples on 1 worker" in rest
    losses, accuracies = _after("test loss", whole), _after("accuracy", whole)
    assert losses[1] < losses[0]
    assert _after("test loss", cut + rest) == pytest.approx(losses, abs=1.1e-4)
    assert _after("accuracy", cut + rest) == accuracies


def test_the_cifarnet_learns_and_its_loss_does_not_depend_on_the_workers(fashion: Path) -> None:
    small = _small(fashion, "--net", "cifarnet", "--epochs", 6)

    two = _after("test loss", _run("fashion_resnet", *small, split=(2, 6)))
    one = _after("test loss", _run("fashion_resnet", *small, split=(8,)))

    assert two[-1] < two[0]
    assert two == pytest.approx(one, abs=1.1e-4)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (
            "fashion_resnet",
            "nowhere/fashion-mnist/train-images-idx3-ubyte.gz is missing; pass --data",
        ),
        ("sparse_svm", "nowhere/gutenberg has no .txt.gz files; pass --texts"),
        ("tiny_gpt", "nowhere/wikitext-2/valid.txt is missing; pass --text"),
        ("linear_regression", "nowhere/uci-regression/power-plant.txt.gz is missing; pass --table"),
    ],
)
def test_an_example_without_its_data_says_in_one_line_what_to_pass(name: str, remedy: str) -> None:
    code, output = _end(name)

    assert code == 1
    assert len(output.splitlines()) == 1
    assert output.startswith(remedy)
