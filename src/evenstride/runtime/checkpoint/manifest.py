"""The manifest of a checkpoint: what makes it complete, and what tells that it is whole.

A checkpoint is a folder whose name no other attempt has. Its manifest is written last, and says
for every other file how long it is and what its digest is; a digest of the manifest itself is its
last line. So a checkpoint is complete if its manifest is there and right, wherever and however
the writing of another one ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from xxhash import xxh3_128

from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint.codec import from_bytes, to_bytes
from evenstride.runtime.checkpoint.errors import CheckpointDamaged
from evenstride.runtime.checkpoint.storage import Bytes, Storage

FORMAT = 1
MANIFEST, METADATA = "manifest.json", "metadata.json"
CHUNK_BYTES = 4 << 20
# Thousands of ranks with thousands of tensors need less; what is longer is not ours.
MOST_BYTES = 1 << 30

_NAME = re.compile(r"step-(\d{9,})-([0-9a-f]{12})-(\d+)")
_FILE = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(METADATA)}|(tensors|items)-\d{{5,}}\.\w+")


@dataclass(frozen=True, slots=True)
class Name:
    """The name of one attempt to save, which no other attempt ever has.

    Names are in order: of a later run after those of an earlier one, even if that one, stopped
    for a while, should save a later step afterwards; within a run by step and attempt.

    Args:
        step: of the state, over all restarts.
        generation: of the run that saves: twelve hexadecimal digits that grow from run to run.
        attempt: counts the attempts of that run at that step.
    """

    step: int
    generation: str
    attempt: int

    def __lt__(self, other: Name) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[str, int, int]:
        return self.generation, self.step, self.attempt

    def __str__(self) -> str:
        return f"step-{self.step:09d}-{self.generation}-{self.attempt}"

    def file(self, name: str) -> str:
        """Return the name of a file in it."""
        return f"{self}/{name}"


def parse_name(text: str) -> Name | None:
    """Return the attempt that a folder is of; ``None`` if it is not ours."""
    match = _NAME.fullmatch(text)
    return Name(int(match[1]), match[2], int(match[3])) if match else None


def is_our_file(name: str) -> bool:
    """Return whether a file in a checkpoint's folder is one that we write."""
    return _FILE.fullmatch(name) is not None


def tensors_file(rank: int) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"tensors-{rank:05d}.bin"


def items_file(rank: int) -> str:
    """Return the name of the file with what else a rank has saved."""
    return f"items-{rank:05d}.jsonl"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file's size in bytes and its digest."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        format: version of all of it.
        step: steps trained.
        created_unix_s: when it was begun, by the leader's clock.
        world_size: ranks that saved it.
        versions: of evenstride and torch.
        stride: the `Stride`'s own state.
        data: of the data set trained on: kind, length and a digest of some samples.
        workers: what was known of them, for the first split of the next run.
        files: the other files, by name.
    """

    format: int
    step: int
    created_unix_s: float
    world_size: int
    versions: dict[str, str]
    stride: dict[str, Any]
    data: dict[str, Any]
    workers: dict[str, Any]
    files: dict[str, FileInfo]


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as the bytes of its file: two lines, the second the first one's digest."""
    body = to_bytes(asdict(manifest))
    return body + to_bytes({"digest": digest([body])})


def decode(data: bytes) -> Manifest:
    """Return the manifest in the bytes of a file.

    Raises:
        CheckpointDamaged: they are not all there, or not those that were written.
        ConfigError: they are, and of another format.
    """
    body, newline, end = data.partition(b"\n")
    body += newline
    lines = end.endswith(b"\n") and end.count(b"\n") == 1
    told = from_bytes(end, "the last line of the manifest") if lines else None
    if not isinstance(told, dict) or told.get("digest") != digest([body]):
        raise CheckpointDamaged("its manifest is not complete, or differs from what was written")
    plain = from_bytes(body, "the manifest")
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        found = plain.get("format") if isinstance(plain, dict) else None
        raise ConfigError(
            f"the checkpoint has format {found!r}, and this evenstride reads {FORMAT}; restore it "
            "with the version that wrote it, or choose another folder to start anew"
        )
    try:
        files = {str(name): FileInfo(**info) for name, info in plain.pop("files").items()}
        return Manifest(**plain, files=files)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointDamaged("its manifest lacks what a manifest holds") from error


class Digest:
    """A digest that grows: XXH3 of 128 bits.

    It is to tell damage, of which it misses one in 2**128 (a CRC one in four thousand million); who
    may write here may write a fitting digest, too, whatever its kind. A cryptographic one was half
    of what a save costs; this one is thirty times as fast. It lets go of the interpreter lock.
    """

    def __init__(self) -> None:
        self._hash, self.size_bytes = xxh3_128(), 0

    def update(self, data: Bytes) -> None:
        """Take in more bytes."""
        self._hash.update(data)
        self.size_bytes += len(data)

    def info(self) -> FileInfo:
        """Return size and digest of what was taken in."""
        return FileInfo(self.size_bytes, self._hash.hexdigest())

    def through(self, chunks: Iterable[Bytes]) -> Iterator[Bytes]:
        """Yield the chunks, and take them in."""
        for chunk in chunks:
            self.update(chunk)
            yield chunk


def digest(chunks: Iterable[Bytes]) -> str:
    """Return the digest of bytes."""
    whole = Digest()
    for chunk in chunks:
        whole.update(chunk)
    return whole.info().digest


def read_manifest(storage: Storage, name: Name) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointDamaged: it is not there, or not right.
        OSError: the storage cannot be read.
    """
    try:
        data = storage.read(name.file(MANIFEST), 0, MOST_BYTES)
    except FileNotFoundError as error:
        raise CheckpointDamaged("it has no manifest, so its saving did not end") from error
    manifest = decode(data)
    if manifest.step != name.step:
        raise CheckpointDamaged(f"its manifest is of step {manifest.step}, not of its folder's")
    return manifest


def check_file(storage: Storage, name: str, expected: FileInfo) -> str | None:
    """Return what is wrong with a file, ``None`` if nothing; reads all of it."""
    whole = Digest()
    try:
        while whole.size_bytes < expected.size_bytes:
            left = expected.size_bytes - whole.size_bytes
            chunk = storage.read(name, whole.size_bytes, min(CHUNK_BYTES, left))
            if not chunk:
                break
            whole.update(chunk)
        longer = storage.read(name, expected.size_bytes, 1)
    except FileNotFoundError:
        return f"{name} is missing"
    except Exception as error:  # whatever a store raises, it is this file that cannot be read
        return f"{name} cannot be read ({type(error).__name__}: {error})"
    if whole.size_bytes != expected.size_bytes or longer:
        there = f"more than {expected.size_bytes}" if longer else f"{whole.size_bytes}"
        return f"{name} has {there} bytes, and {expected.size_bytes} were written"
    if whole.info().digest != expected.digest:
        return f"{name} differs from what was written"
    return None
