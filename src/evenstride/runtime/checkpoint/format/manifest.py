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
from evenstride.runtime.checkpoint.checkpoint_errors import (
    NOT_THERE,
    CheckpointDamaged,
    CheckpointError,
    NotAFile,
    NotWhole,
)
from evenstride.runtime.checkpoint.format.manifest_schema import check_plain
from evenstride.runtime.checkpoint.format.state_codec import from_bytes, to_bytes
from evenstride.runtime.checkpoint.format.storage import Bytes, PatientReader, Storage
from evenstride.runtime.loading.position import POSITION_VERSION

FORMAT = 1
MANIFEST, METADATA = "manifest.json", "metadata.json"
CHUNK_BYTES = 4 << 20
# Ten thousand ranks and as many remembered workers need a tenth of this. Nothing longer is written,
# so nothing longer is read.
MOST_MANIFEST_BYTES = 64 << 20

_NAME = re.compile(r"step-([0-9]{9,18})-([0-9a-f]{12})-([0-9]{1,9})")
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
    name = Name(int(match[1]), match[2], int(match[3])) if match else None
    return name if str(name) == text else None  # another folder could have the same name otherwise


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
        earlier: checkpoints that the same training run wrote before its last restart, and has not
            deleted yet.
        run: identifies the training run, over all restarts; empty in files of an earlier version.
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
    earlier: tuple[str, ...] = ()
    run: str = ""


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as the bytes of its file: two lines, the second the first one's digest.

    Raises:
        CheckpointError: `decode` would not read it.
    """
    body = to_bytes(asdict(manifest))
    # A manifest that restore() would refuse must fail the save, while training can still repeat
    # it.
    check_plain(from_bytes(body, "the manifest"))
    if len(body) > MOST_MANIFEST_BYTES - 1024:
        raise CheckpointError(
            f"the manifest would be {len(body)} bytes long, and at most {MOST_MANIFEST_BYTES} can "
            "be read; save from fewer ranks"
        )
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return to_bytes({"digest": digest([body])})


def decode(data: bytes) -> Manifest:
    """Return the manifest in the bytes of a file.

    Raises:
        NotWhole: they are not all there, or not those that were written.
        CheckpointDamaged: they are what was written, and not by evenstride.
        ConfigError: they are of another format.
    """
    plain = from_bytes(_unsealed(data), "its manifest")
    if isinstance(plain, dict):
        # Before the schema, which a manifest of a later version need not fit.
        _require_readable("format", plain.get("format"), FORMAT)
        stride = plain.get("stride")
        version = stride.get("version") if isinstance(stride, dict) else None
        _require_readable("a position of version", version, POSITION_VERSION)
    check_plain(plain)
    if METADATA not in plain["files"]:
        raise CheckpointDamaged(f"its manifest does not list {METADATA}")
    listed = plain["files"].items()
    files = {name: FileInfo(info["size_bytes"], info["digest"]) for name, info in listed}
    # Manifests of earlier versions lack some fields, which have defaults.
    known = {name: plain[name] for name in Manifest.__slots__ if name in plain}
    return Manifest(**known | {"files": files, "earlier": tuple(plain.get("earlier", ()))})


def _unsealed(data: bytes) -> bytes:
    """Return the first line of a manifest, whose digest is the second one.

    Raises:
        NotWhole: it is not; it has not ended if the bytes are the beginning of a whole manifest.
    """
    body, newline, end = data.partition(b"\n")
    body += newline
    seal = _seal(body)
    if newline and end == seal:
        return body
    if len(data) > MOST_MANIFEST_BYTES:
        raise NotWhole(f"its manifest has more than {MOST_MANIFEST_BYTES} bytes", ended=True)
    if not newline or (seal.startswith(end) and _is_json(body)):
        raise NotWhole("its manifest is not complete, so its saving did not end", ended=False)
    raise NotWhole("its manifest differs from what was written", ended=True)


def _is_json(body: bytes) -> bool:
    try:
        from_bytes(body, "")
    except CheckpointDamaged:
        return False
    return True


def _require_readable(what: str, found: Any, known: int) -> None:
    if type(found) is int and found != known:
        raise ConfigError(
            f"the checkpoint has {what} {found}, and this evenstride reads {known}; restore it "
            "with the version that wrote it, or choose another folder to start from scratch"
        )


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


def read_manifest(storage: Storage | PatientReader, name: Name) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        NotWhole: it is not there, or not right.
        CheckpointDamaged: it was not written by evenstride.
        CheckpointError: it cannot be read now.
    """
    try:
        # One byte more than allowed, to notice a file that is too long.
        data = storage.read(name.file(MANIFEST), 0, MOST_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise NotWhole("it has no manifest, so its saving did not end", ended=False) from error
    except NOT_THERE as error:
        raise NotWhole(f"its manifest cannot be opened: {_told(error)}", ended=True) from error
    manifest = decode(data)
    if manifest.step != name.step:
        raise NotWhole(
            f"its manifest is of step {manifest.step}, not of its folder's step", ended=True
        )
    return manifest


def check_file(storage: Storage | PatientReader, name: str, expected: FileInfo) -> str | None:
    """Return what is wrong with a file, ``None`` if nothing; reads all of it.

    Raises:
        CheckpointError: it cannot be read now, so nothing is known of it.
    """
    whole = Digest()
    try:
        while whole.size_bytes < expected.size_bytes:
            left = expected.size_bytes - whole.size_bytes
            # In pieces, as a file may be larger than memory.
            chunk = storage.read(name, whole.size_bytes, min(CHUNK_BYTES, left))
            if not chunk:
                return (
                    f"{name} has {whole.size_bytes} bytes, and {expected.size_bytes} were written"
                )
            whole.update(chunk)
        longer = storage.read(name, expected.size_bytes, 1)
    except FileNotFoundError:
        return f"{name} is missing"
    except NOT_THERE as error:
        return f"{name} cannot be opened: {_told(error)}"
    if longer:
        return f"{name} has more than {expected.size_bytes} bytes, and so many were written"
    if whole.info().digest != expected.digest:
        return f"{name} differs from what was written"
    return None


def _told(error: OSError) -> str:
    return error.strerror if isinstance(error, NotAFile) and error.strerror else str(error)
