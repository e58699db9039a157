"""The manifest of a checkpoint: what makes it complete, and what tells that it is whole.

A checkpoint is a folder whose name no other attempt has. Its manifest is written last, and says for
every other file how long it is and what its digest is; a digest of the manifest itself is its last
line. So a checkpoint is complete if its manifest is there and right, wherever and however the
writing of another one ended.

A digest tells damage, not forgery: a manifest with a fitting digest can hold anything. So the type
and the range of every value are checked before anything in it is used (`ManifestSchema`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from xxhash import xxh3_128

from evenstride.errors import CheckpointDamaged, CheckpointError, ConfigError
from evenstride.runtime.checkpoint.format.state_codec import from_bytes, to_bytes
from evenstride.runtime.checkpoint.format.storage import (
    NOT_THERE,
    Bytes,
    NotAFile,
    PatientReader,
    Storage,
)
from evenstride.runtime.loading.position import POSITION_VERSION

FORMAT = 1
MANIFEST, METADATA = "manifest.json", "metadata.json"
CHUNK_BYTES = 4 << 20
# Ten thousand ranks and as many remembered workers need a tenth of this. Nothing longer is written,
# so nothing longer is read.
MOST_MANIFEST_BYTES = 64 << 20

_NAME = re.compile(r"step-([0-9]{9,18})-([0-9a-f]{12})-([0-9]{1,9})")
_FILE = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(METADATA)}|(tensors|items)-\d{{5,}}\.\w+")

_MOST = 2**62

Natural = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[int, Field(ge=1, le=_MOST)]
Pair = Annotated[list[Natural], Field(min_length=2, max_length=2)]

_LISTED_FILE = r"^(metadata\.json|tensors-[0-9]{5,9}\.bin|items-[0-9]{5,9}\.jsonl)$"


class NotWhole(CheckpointDamaged):
    """A checkpoint's manifest is missing, or is not what was written.

    ``ended`` tells whether it was written to its end and damaged later. If not, the process that
    saved it may have died in the middle.
    """

    def __init__(self, message: str, *, ended: bool) -> None:
        super().__init__(message)
        self.ended = ended


@dataclass(frozen=True, slots=True)
class Name:
    """The name of one attempt to save, which no other attempt ever has.

    Names are in order: of a later run after those of an earlier one, even if that one, stopped for
    a while, should save a later step afterwards; within a run by step and attempt.
    """

    step: int  # of the state, over all restarts
    generation: str  # of the run: twelve hexadecimal digits that grow from run to run
    attempt: int  # counts the attempts of that run at that step

    def __lt__(self, other: Name) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[str, int, int]:
        return self.generation, self.step, self.attempt

    def __str__(self) -> str:
        return f"step-{self.step:09d}-{self.generation}-{self.attempt}"

    def file(self, name: str) -> str:
        return f"{self}/{name}"


def parse_name(text: str) -> Name | None:
    """Return the attempt that a folder is of; ``None`` if it is not ours."""
    match = _NAME.fullmatch(text)
    name = Name(int(match[1]), match[2], int(match[3])) if match else None
    return name if str(name) == text else None  # another folder could have the same name otherwise


def is_our_file(name: str) -> bool:
    return _FILE.fullmatch(name) is not None


def tensors_file(rank: int) -> str:
    return f"tensors-{rank:05d}.bin"


def items_file(rank: int) -> str:
    """Return the name of the file with what a rank has saved besides tensors, as JSON lines."""
    return f"items-{rank:05d}.jsonl"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file's size in bytes and its digest."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds."""

    format: int  # version of all of it
    step: int  # steps trained
    created_unix_s: float  # when it was begun, by the leader's clock
    world_size: int  # ranks that saved it
    versions: dict[str, str]  # of evenstride and torch
    stride: dict[str, Any]  # the `Stride`'s own state
    data: dict[str, Any]  # of the data set: kind, length and a digest of some samples
    workers: dict[str, Any]  # what was known of them, for the first split of the next run
    files: dict[str, FileInfo]  # the other files, by name
    # checkpoints that the same training run wrote before its last restart, and has not deleted yet
    earlier: tuple[str, ...] = ()
    # identifies the training run, over all restarts; empty in files of an earlier version
    run: str = ""


class _Schema(BaseModel):
    """Types are taken exactly; what a later version adds is passed over."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class FileSchema(_Schema):
    size_bytes: Natural
    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class DealingSchema(_Schema):
    """What is left of an epoch of data in shards."""

    begun: Natural
    rest: list[Pair]
    open: list[list[Pair]]


class PositionSchema(_Schema):
    """The state of a `Stride`."""

    version: int
    seed: int
    epoch: Natural
    position: Natural
    step: Natural
    global_batch: Positive
    length: Natural | None
    shuffle: bool
    drop_last: bool
    by_epoch: bool
    parts: list[Natural]
    shards: str
    left: DealingSchema | None
    batches: list[Pair] = []

    @model_validator(mode="after")
    def _is_within_the_data(self) -> Self:
        if self.position > (self.length or 0):
            raise ValueError(f"position {self.position} of {self.length} samples")
        if not all(samples for _, samples in self.batches):
            raise ValueError("a global batch of 0 samples")
        if self.left is not None:
            opened = (stretch for lanes in self.left.open for stretch in lanes)
            stretches = sorted(s for s in (*self.left.rest, *opened) if s[0] != s[1])
            ends = [0, *(end for stretch in stretches for end in stretch), self.length or 0]
            if any(before > after for before, after in pairwise(ends)):
                raise ValueError("what is left of the shards overlaps, or is not in the data")
        return self


class DataSchema(_Schema):
    kind: str = ""
    length: Natural = 0
    samples: str = ""


class ProfileSchema(_Schema):
    host: str
    device: str
    slot: Natural | None
    name: str
    curve: Annotated[list[float], Field(min_length=5, max_length=5)]
    noise: float
    steps: Natural


class LossesSchema(_Schema):
    """How many workers were lost so far, and how many were expected to be."""

    failures: Natural
    expected: Annotated[float, Field(ge=0)]


class WorkersSchema(_Schema):
    generation: Natural = 0
    profiles: list[ProfileSchema] = []
    losses: LossesSchema | None = None
    parting: bool = False


class ManifestSchema(_Schema):
    format: int
    step: Natural
    created_unix_s: float
    world_size: Positive
    versions: dict[str, str]
    stride: PositionSchema
    data: DataSchema
    workers: WorkersSchema
    files: dict[Annotated[str, Field(pattern=_LISTED_FILE)], FileSchema]
    earlier: list[str] = []
    run: Annotated[str, Field(pattern="^([0-9a-f]{32})?$")] = ""

    @model_validator(mode="after")
    def _has_two_files_for_each_rank(self) -> Self:
        if len(self.files) > 2 * self.world_size + 1:
            raise ValueError(f"{len(self.files)} files of {self.world_size} ranks")
        return self


def check_plain(plain: Any) -> None:
    """Check the content of a manifest, as JSON types.

    Raises:
        CheckpointDamaged: names the first value that no evenstride writes.
    """
    try:
        ManifestSchema.model_validate(plain)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"]) or "all of it"
        raise CheckpointDamaged(
            f"its manifest has an impossible value: {where}: {first['msg'][:80]}"
        ) from None


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
        self._hash.update(data)
        self.size_bytes += len(data)

    def info(self) -> FileInfo:
        return FileInfo(self.size_bytes, self._hash.hexdigest())

    def through(self, chunks: Iterable[Bytes]) -> Iterator[Bytes]:
        for chunk in chunks:
            self.update(chunk)
            yield chunk


def digest(chunks: Iterable[Bytes]) -> str:
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
