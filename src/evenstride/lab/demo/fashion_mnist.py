"""Fashion-MNIST from its four gzipped IDX files (Xiao, Rasul & Vollgraf, arXiv 1708.07747)."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evenstride.errors import ConfigError

Bytes = npt.NDArray[np.uint8]

FASHION_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}


def check_data(folder: Path | None) -> None:
    """Raise unless the folder has all four files or, without one, scikit-learn is installed."""
    if folder is None:
        if not _has_digits():
            raise ConfigError(
                "the demo needs scikit-learn for its digits, and it is not installed; run "
                "pip install 'evenstride[demo]', or give --data a folder with Fashion-MNIST"
            )
        return
    for name in itertools.chain(*FASHION_FILES.values()):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder / name} is missing; give --data a folder with the four .gz files of "
                "Fashion-MNIST"
            )


def _has_digits() -> bool:
    try:
        return importlib.util.find_spec("sklearn.datasets") is not None
    except ModuleNotFoundError:
        return False


def read_images(folder: Path, part: str) -> tuple[Bytes, Bytes]:
    """Return the images, shape ``(samples, 28, 28)``, and labels of ``train`` or ``test``."""
    images_name, labels_name = FASHION_FILES[part]
    images, labels = _read_idx(folder / images_name), _read_idx(folder / labels_name)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ConfigError(
            f"{folder / images_name} has shape {images.shape} and {labels_name} {labels.shape}; "
            "expected square images and one label for each; download both again"
        )
    return images, labels


def _read_idx(path: Path) -> Bytes:
    """Return the array in an IDX file of bytes (http://yann.lecun.com/exdb/mnist)."""
    try:
        data = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path} is not a gzip file ({error}); download it again") from None
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise ConfigError(f"{path} is not an IDX file of bytes; download it again")
    dimensions = data[3]
    try:
        shape = np.frombuffer(data, ">u4", dimensions, offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape.astype(int))
    except ValueError:
        raise ConfigError(
            f"{path} is truncated: it has fewer bytes than its header says; download it again"
        ) from None
