"""The manifest of a checkpoint: it makes the checkpoint complete, and reveals damage.

A checkpoint is a folder with a unique name. Its manifest is written last. It holds the size and the
digest of every other file; its last line is its own digest. So a checkpoint is complete if and only
if its manifest exists and is intact, even if another save failed.

A digest reveals damage, not forgery: a manifest with a correct digest can hold anything. So the
type and the range of every value are checked before any value is used (`ManifestSchema`).
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
# Ten thousand ranks and as many remembered workers need a tenth of this. Longer manifests are
# neither written nor read.
MOST_MANIFEST_BYTES = 64 << 20

_NAME = re.compile(r"step-([0-9]{9,18})-([0-9a-f]{12})-([0-9]{1,9})")
_FILE = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(METADATA)}|(tensors|items)-\d{{5,}}\.\w+")

_MOST = 2**62

Natural = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[int, Field(ge=1, le=_MOST)]
Pair = Annotated[list[Natural], Field(min_length=2, max_length=2)]

_LISTED_FILE = r"^(metadata\.json|tensors-[0-9]{5,9}\.bin|items-[0-9]{5,9}\.jsonl)$"


class NotWhole(CheckpointDamaged):
    """A checkpoint's manifest is missing, or differs from the one that was written.

    ``ended``: it was written completely and damaged later. Otherwise, the saving process may have
    died during the save.
    """

    def __init__(self, message: str, *, ended: bool) -> None:
        super().__init__(message)
        self.ended = ended


@dataclass(frozen=True, slots=True)
class Name:
    """The unique name of one attempt to save.

    Names are ordered by run, step and attempt. Those of a later run come last, even if an earlier,
    suspended run saves a later step afterwards.
    """

    step: int  # of the state, over all restarts
    generation: str  # of the run: twelve hexadecimal digits that grow from run to run
    attempt: int  # counts the run's attempts at that step

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
    """Return the attempt to which a folder belongs; ``None`` if it is not a checkpoint's."""
    match = _NAME.fullmatch(text)
    name = Name(int(match[1]), match[2], int(match[3])) if match else None
    return name if str(name) == text else None  # else two folders could parse to the same name


def is_our_file(name: str) -> bool:
    return _FILE.fullmatch(name) is not None


def tensors_file(rank: int) -> str:
    return f"tensors-{rank:05d}.bin"


def items_file(rank: int) -> str:
    """Return the name of the file with a rank's state other than tensors, as JSON lines."""
    return f"items-{rank:05d}.jsonl"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file's size in bytes and its digest."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint."""

    format: int  # the format's version
    step: int  # trained steps
    created_unix_s: float  # start of the save, by the leader's clock
    world_size: int  # number of ranks that saved it
    versions: dict[str, str]  # of evenstride and torch

    stride: dict[str, Any]  # the `Stride`'s own state
    data: dict[str, Any]  # the data set's kind and length, and a digest of some samples
    workers: dict[str, Any]  # learned about the workers, for the first split of the next run
    files: dict[str, FileInfo]  # the other files, by name

    # Checkpoints that the same training run wrote before its last restart and still keeps.
    earlier: tuple[str, ...] = ()

    # Identifies the training run, over all restarts. It is empty in files of an earlier version.
    run: str = ""


class _Schema(BaseModel):
    """Requires exact types; ignores fields that a later version adds."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class FileSchema(_Schema):
    size_bytes: Natural
    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class DealingSchema(_Schema):
    """The part of an epoch of sharded data that is not trained yet."""

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
    parts_end: Natural
    shards: str
    left: DealingSchema | None
    batches: list[Pair] = []

    @model_validator(mode="after")
    def _is_within_the_data(self) -> Self:
        if self.position > (self.length or 0):
            raise ValueError(f"position {self.position} of {self.length} samples")
        if self.parts_end > self.position:
            raise ValueError(f"parts up to {self.parts_end} at position {self.position}")
        if not all(samples for _, samples in self.batches):
            raise ValueError("a global batch of 0 samples")
        if self.left is not None:
            opened = (stretch for lanes in self.left.open for stretch in lanes)
            stretches = sorted(s for s in (*self.left.rest, *opened) if s[0] != s[1])
            ends = [0, *(end for stretch in stretches for end in stretch), self.length or 0]
            if any(before > after for before, after in pairwise(ends)):
                raise ValueError("the rest of the shards overlaps, or exceeds the data")
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
    """The number of workers lost so far, and the expected number."""

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
        CheckpointDamaged: names the first invalid value.
    """
    try:
        ManifestSchema.model_validate(plain)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"]) or "the whole manifest"
        raise CheckpointDamaged(
            f"its manifest has an invalid value: {where}: {first['msg'][:80]}"
        ) from None


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as the bytes of its file: the manifest, and its digest on a second line.

    Raises:
        CheckpointError: `decode` would refuse it.
    """
    body = to_bytes(asdict(manifest))
    # A manifest that restore() refuses must fail the save, which training can still repeat.
    check_plain(from_bytes(body, "the manifest"))
    if len(body) > MOST_MANIFEST_BYTES - 1024:
        raise CheckpointError(
            f"the manifest would have {len(body)} bytes, more than the {MOST_MANIFEST_BYTES} that "
            "can be read; save from fewer ranks"
        )
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return to_bytes({"digest": digest([body])})


def decode(data: bytes) -> Manifest:
    """Return the manifest in the bytes of a file.

    Raises:
        NotWhole: bytes are missing, or differ from those that were written.
        CheckpointDamaged: they are intact, but evenstride did not write them.
    """
    plain = from_bytes(_unsealed(data), "its manifest")
    if isinstance(plain, dict):
        # Before the schema, which a manifest of a later version need not match.
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
    """Return the first line of a manifest after comparing it with the digest in the second.

    Raises:
        NotWhole: they differ; ``ended`` is false if the bytes are the start of an intact manifest.
    """
    body, newline, end = data.partition(b"\n")
    body += newline
    seal = _seal(body)
    if newline and end == seal:
        return body
    if len(data) > MOST_MANIFEST_BYTES:
        raise NotWhole(f"its manifest has more than {MOST_MANIFEST_BYTES} bytes", ended=True)
    if not newline or (seal.startswith(end) and _is_json(body)):
        raise NotWhole("its manifest is incomplete, so the save did not finish", ended=False)
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
            f"the checkpoint has {what} {found}, but this version of evenstride reads {known}; "
            "restore it with the version that wrote it, or use another folder to start from "
            "scratch"
        )


class Digest:
    """An incremental 128-bit XXH3 digest.

    It misses one damage in 2**128 (a CRC one in four thousand million). It does not protect from
    forgery: anyone with write access can write a correct digest of any kind. A cryptographic digest
    took half the time of a save; this one is thirty times as fast. It releases the GIL.
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
        NotWhole: it is missing or damaged.
        CheckpointDamaged: evenstride did not write it.
        CheckpointError: the storage fails.
    """
    try:
        # One byte more than allowed, to detect a file that is too long.
        data = storage.read(name.file(MANIFEST), 0, MOST_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise NotWhole("it has no manifest, so the save did not finish", ended=False) from error
    except NOT_THERE as error:
        raise NotWhole(f"its manifest cannot be opened: {_reason(error)}", ended=True) from error
    manifest = decode(data)
    if manifest.step != name.step:
        raise NotWhole(
            f"its manifest belongs to step {manifest.step}, not to its folder's step", ended=True
        )
    return manifest


def check_file(storage: Storage | PatientReader, name: str, expected: FileInfo) -> str | None:
    """Read a whole file, and return a description of its damage; ``None`` if it is intact.

    Raises:
        CheckpointError: the storage fails, so the state of the file is unknown.
    """
    whole = Digest()
    try:
        while whole.size_bytes < expected.size_bytes:
            left = expected.size_bytes - whole.size_bytes
            # In chunks, because a file may be larger than memory.
            chunk = storage.read(name, whole.size_bytes, min(CHUNK_BYTES, left))
            if not chunk:
                return (
                    f"{name} has {whole.size_bytes} bytes, but {expected.size_bytes} were written"
                )
            whole.update(chunk)
        longer = storage.read(name, expected.size_bytes, 1)
    except FileNotFoundError:
        return f"{name} is missing"
    except NOT_THERE as error:
        return f"{name} cannot be opened: {_reason(error)}"
    if longer:
        return f"{name} has more than the {expected.size_bytes} bytes that were written"
    if whole.info().digest != expected.digest:
        return f"{name} differs from what was written"
    return None


def _reason(error: OSError) -> str:
    return error.strerror if isinstance(error, NotAFile) and error.strerror else str(error)
