"""The demo's data and its network."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import pytest
import torch

from evenstride.errors import ConfigError
from evenstride.lab.demo.demo_script import load_task, small_net
from evenstride.lab.demo.fashion_mnist import FASHION_FILES
from tests.messages import raises_message


def _idx(*shape: int, kind: int = 8, data: bytes | None = None) -> bytes:
    count = 1
    for edge in shape:
        count *= edge
    header = bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    return header + (bytes(n % 256 for n in range(count)) if data is None else data)


def _fashion(folder: Path, train: int = 5, test: int = 3) -> Path:
    for part, count in (("train", train), ("test", test)):
        images, labels = FASHION_FILES[part]
        (folder / images).write_bytes(gzip.compress(_idx(count, 4, 4)))
        (folder / labels).write_bytes(gzip.compress(_idx(count)))
    return folder


def test_the_digits_are_split_into_numbered_train_and_test_samples() -> None:
    pytest.importorskip("sklearn")

    task = load_task(None)

    assert task.name == "digits"
    assert task.net()(task.test.tensors[1][:2]).shape == (2, 10)
    assert len(task.train) + len(task.test) == 1797
    for part in (task.train, task.test):
        ids, images, labels = part.tensors
        assert ids.tolist() == list(range(len(part)))
        assert images.shape[1:] == (1, 8, 8)
        assert images.dtype == torch.float32
        assert float(images.min()) >= -1.0 and float(images.max()) <= 1.0
        assert set(labels.tolist()) == set(range(10))


def test_without_scikit_learn_the_digits_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    with raises_message(ConfigError, "'evenstride[demo]'", "--data"):
        load_task(None)


def test_fashion_mnist_is_read_from_its_four_files(tmp_path: Path) -> None:
    task = load_task(_fashion(tmp_path))

    ids, images, labels = task.train.tensors
    assert (task.name, len(task.train), len(task.test)) == ("Fashion-MNIST", 5, 3)
    assert ids.tolist() == labels.tolist() == [0, 1, 2, 3, 4]
    assert images.shape == (5, 1, 4, 4)
    assert images[1, 0, 0, 0].item() == pytest.approx(16 / 127.5 - 1)
    assert images[2, 0, 3, 3].item() == pytest.approx(47 / 127.5 - 1)


@pytest.mark.data
def test_the_real_fashion_mnist_has_its_sizes(data_root: Path) -> None:
    folder = data_root / "fashion-mnist"
    if not (folder / FASHION_FILES["train"][0]).exists():
        pytest.skip("no Fashion-MNIST among the data")

    task = load_task(folder)

    assert (len(task.train), len(task.test)) == (60_000, 10_000)
    assert task.train.tensors[1].shape[1:] == (1, 28, 28)
    assert torch.bincount(task.test.tensors[2]).tolist() == [1000] * 10


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_file_is_named(tmp_path: Path, part: str, which: int) -> None:
    name = FASHION_FILES[part][which]
    (_fashion(tmp_path) / name).unlink()

    with raises_message(ConfigError, name, "--data"):
        load_task(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"plain", ()),
        (gzip.compress(_idx(5, 4, 4))[:20], ()),
        (gzip.compress(b"abc"), ("IDX",)),
        (gzip.compress(_idx(5, 4, 4, kind=13)), ("IDX",)),
        (gzip.compress(_idx(6, 4, 4)), ()),
        (gzip.compress(_idx(5)), ()),
    ],
    ids=["plain", "cut off", "short", "floats", "another length", "flat"],
)
def test_a_file_that_is_something_else_is_refused_by_name(
    tmp_path: Path, content: bytes, text: tuple[str, ...]
) -> None:
    (_fashion(tmp_path) / FASHION_FILES["train"][0]).write_bytes(content)

    with raises_message(ConfigError, FASHION_FILES["train"][0], *text):
        load_task(tmp_path)


@pytest.mark.parametrize(
    "content",
    [_idx(5, 4, 4)[:-10], _idx(5, 4, 4)[:9]],
    ids=["pixels are missing", "the header is cut"],
)
def test_a_file_that_ends_too_early_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    name = FASHION_FILES["train"][0]
    (_fashion(tmp_path) / name).write_bytes(gzip.compress(content))

    with raises_message(ConfigError, name):
        load_task(tmp_path)


@pytest.mark.parametrize(("stride", "edge"), [(1, 8), (4, 28)], ids=["digits", "fashion"])
def test_the_net_is_the_same_for_the_same_seed_and_leaves_the_random_state_alone(
    stride: int, edge: int
) -> None:
    state = torch.get_rng_state()

    first, again, other = (small_net(stride, seed, width=16) for seed in (0, 0, 1))

    assert torch.equal(torch.get_rng_state(), state)
    weights = [torch.cat([p.flatten() for p in net.parameters()]) for net in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert first(torch.zeros(2, 1, edge, edge)).shape == (2, 10)


def test_the_net_does_not_mix_samples() -> None:
    net = small_net(1, width=16).double().eval()
    images = torch.linspace(-1, 1, 3 * 64, dtype=torch.float64).reshape(3, 1, 8, 8)

    net.train()
    together = net(images)

    alone = torch.cat([net(images[n : n + 1]) for n in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
