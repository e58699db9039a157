"""Random damage to a folder of checkpoints, and what a restart may make of it.

Shared by a test of some cases and by ``benchmarks/soak.py --damages``, which runs a thousand.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstride.errors import CheckpointError, ConfigError, EvenstrideError
from evenstride.runtime.checkpoint.format.manifest import Digest, digest, parse_name
from evenstride.runtime.checkpoint.format.state_codec import to_bytes
from tests.unit.runtime.checkpoint.kept import Solo

STEPS = (2, 4, 6)
FILES = ("tensors-00000.bin", "items-00000.jsonl", "metadata.json", "manifest.json")
DEEP = "[" * 100_000 + "]" * 100_000
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, -100, 2**31, 2**63, 2**200, 1.5, -0.0, 1e300, float("nan")),
    *("", "x", "../../etc/passwd", "/etc/passwd", "tensors-00000.bin", "9" * 300, "\0"),
    *([], {}, [[]], [None], {"$": "tensor", "v": "model/bias"}, {"$": []}, {"a": {}}, ["a", 1]),
)


def weights_of(run: Solo) -> list[list[float]]:
    """Return all that a checkpoint holds of a run's tensors: the model's, and Adam's averages."""
    state = run.optimizer.state_dict()["state"]
    averages = [value.tolist() for one in state.values() for value in one.values()]
    return run.weights() + averages


def saved(folder: Path) -> dict[int, list[list[float]]]:
    """Save three checkpoints into a folder; return the tensors of each, by step."""
    known = {}
    run = Solo(folder, every=2, keep=3)
    for step in STEPS:
        run.train(2)
        known[step] = weights_of(run)
    run.checkpoint.close()
    run.close()
    return known


def sealed(plain: Any) -> bytes:
    """Return a manifest as the bytes of a file, with a fitting digest; nothing is checked."""
    body = _line(plain)
    return body + to_bytes({"digest": digest([body])})


def _line(plain: Any) -> bytes:
    """Return JSON in one line; ``DEEP`` stands for itself, as no writer nests as deep."""
    return json.dumps(plain).replace('"DEEP"', DEEP).encode() + b"\n"


def mutated(plain: Any, choose: random.Random) -> Any:
    """Return JSON types with one value, anywhere, replaced, taken out or given twice."""
    odd = choose.choice([*ODD, "DEEP"])
    if not isinstance(plain, dict | list) or not plain or choose.random() < 0.1:
        return odd
    keys: list[Any] = list(plain) if isinstance(plain, dict) else list(range(len(plain)))
    key, how = choose.choice(keys), choose.random()
    copy: Any = dict(plain) if isinstance(plain, dict) else list(plain)
    if how < 0.8:
        copy[key] = mutated(plain[key], choose)
    elif how < 0.9:
        del copy[key]
    elif isinstance(copy, dict):
        copy[str(odd)[:40]] = plain[key]
    else:
        copy.append(plain[key])
    return copy


def forge(checkpoint: Path, file: str, data: bytes) -> None:
    """Replace a file, and make the manifest right for it."""
    manifest = json.loads((checkpoint / "manifest.json").read_bytes().partition(b"\n")[0])
    whole = Digest()
    whole.update(data)
    info = whole.info()
    manifest["files"][file] = {"size_bytes": info.size_bytes, "digest": info.digest}
    (checkpoint / file).write_bytes(data)
    (checkpoint / "manifest.json").write_bytes(sealed(manifest))


class Vandal:
    """Damages a folder of checkpoints, each time in another way.

    Args:
        folder: of the checkpoints.
        choose: a source of choices.
    """

    def __init__(self, folder: Path, choose: random.Random) -> None:
        self._folder, self._choose = folder, choose
        self.done: list[str] = []

    def act(self) -> None:
        """Do one to three things to it."""
        for _ in range(self._choose.choice((1, 1, 1, 2, 3))):
            kind = self._choose.choice(KINDS)
            self.done.append(kind.__name__)
            try:
                kind(self)
            except (OSError, ValueError, KeyError, TypeError) as error:  # damaged already
                self.done[-1] += f" ({type(error).__name__})"

    def _checkpoints(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"))

    def _file(self) -> Path:
        return self._choose.choice(self._checkpoints()) / self._choose.choice(FILES)

    def _flip_in(self, path: Path, bits: int) -> None:
        data = bytearray(path.read_bytes())
        for _ in range(bits):
            data[self._choose.randrange(len(data))] ^= 1 << self._choose.randrange(8)
        path.write_bytes(data)

    def flip_a_bit(self) -> None:
        self._flip_in(self._file(), 1)

    def flip_bits(self) -> None:
        self._flip_in(self._file(), self._choose.randint(2, 40))

    def flip_every_manifest(self) -> None:
        for checkpoint in self._checkpoints():
            self._flip_in(checkpoint / "manifest.json", 1)

    def flip_every_table(self) -> None:
        for checkpoint in self._checkpoints():
            self._flip_in(checkpoint / "metadata.json", 1)

    def cut_off(self) -> None:
        path = self._file()
        os.truncate(path, self._choose.randrange(path.stat().st_size))

    def cut_off_every_manifest(self) -> None:
        for checkpoint in self._checkpoints():
            path = checkpoint / "manifest.json"
            os.truncate(path, self._choose.randrange(path.stat().st_size))

    def lengthen(self) -> None:
        with self._file().open("ab") as file:
            file.write(self._choose.randbytes(self._choose.randint(1, 9000)))

    def fill_with_zeros(self) -> None:
        path = self._file()
        path.write_bytes(bytes(path.stat().st_size))

    def delete(self) -> None:
        self._file().unlink()

    def delete_every_manifest(self) -> None:
        for checkpoint in self._checkpoints():
            (checkpoint / "manifest.json").unlink()

    def swap(self) -> None:
        one, other = self._file(), self._file()
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second), other.write_bytes(first)

    def put_something_else(self) -> None:
        path = self._file()
        data = path.read_bytes()
        path.unlink()
        match self._choose.choice(("folder", "pipe", "link", "dangling", "loop", "socket")):
            case "folder":
                path.mkdir()
            case "pipe":
                os.mkfifo(path)
            case "link":
                outside = self._folder.parent / f"outside-{len(self.done)}"
                outside.write_bytes(data)
                path.symlink_to(outside)
            case "dangling":
                path.symlink_to("/nowhere")
            case "loop":
                path.symlink_to(path)
            case "socket":
                _socket(path)

    def link_to_another_folder(self) -> None:
        checkpoint = self._choose.choice(self._checkpoints())
        outside = self._folder.parent / f"elsewhere-{len(self.done)}"
        checkpoint.rename(outside)
        checkpoint.symlink_to(outside)

    def put_a_file_for_a_checkpoint(self) -> None:
        checkpoint = self._choose.choice(self._checkpoints())
        checkpoint.rename(self._folder.parent / f"moved-{len(self.done)}")
        checkpoint.write_bytes(b"?")

    def copy_to_another_name(self) -> None:
        checkpoint = self._choose.choice(self._checkpoints())
        number = self._choose.randint(0, 10**9 - 1)
        shutil.copytree(checkpoint, self._folder / f"step-{number:09d}-{'7' * 12}-0")

    def forge_the_manifest(self) -> None:
        path = self._choose.choice(self._checkpoints()) / "manifest.json"
        plain = json.loads(path.read_bytes().partition(b"\n")[0])
        path.write_bytes(sealed(mutated(plain, self._choose)))

    def forge_the_table(self) -> None:
        checkpoint = self._choose.choice(self._checkpoints())
        plain = json.loads((checkpoint / "metadata.json").read_bytes())
        forge(checkpoint, "metadata.json", _line(mutated(plain, self._choose)))

    def forge_an_item(self) -> None:
        """Change one item, and the table and the manifest with it."""
        checkpoint = self._choose.choice(self._checkpoints())
        table = json.loads((checkpoint / "metadata.json").read_bytes())
        lines = (checkpoint / FILES[1]).read_bytes().splitlines()
        number = self._choose.randrange(len(lines))
        lines[number] = _line(mutated(json.loads(lines[number]), self._choose))[:-1]
        start_bytes = 0
        for key, line in zip(table["items"], lines, strict=True):
            table["items"][key] = [FILES[1], start_bytes, len(line) + 1]
            start_bytes += len(line) + 1
        forge(checkpoint, FILES[1], b"\n".join(lines) + b"\n")
        forge(checkpoint, "metadata.json", _line(table))


KINDS: tuple[Callable[[Vandal], None], ...] = tuple(
    value for name, value in vars(Vandal).items() if name[0] != "_" and name != "act"
)


def _socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)  # the path of a socket has a limit of 108 characters
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


class LogTexts(logging.Handler):
    """Keeps warnings of the package, while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.texts.append(record.getMessage())

    def __enter__(self) -> LogTexts:
        logging.getLogger("evenstride").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("evenstride").removeHandler(self)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one damaged folder.

    Args:
        outcome: ``exact``, ``fallen back``, ``refused`` as all are damaged, or ``forged``.
        done: what was done to it.
        reported: the error, or the warnings.
    """

    outcome: str
    done: tuple[str, ...]
    reported: str


def judge(origin: Path, known: dict[int, list[list[float]]], folder: Path, seed: int) -> Verdict:
    """Damage a copy of three checkpoints, restart from it, train on, and check what came of it.

    Args:
        origin: the folder of the three.
        known: their tensors, by step.
        folder: a new one, for the copy and what lies outside of it.
        seed: of the damage.

    Raises:
        AssertionError: training restarted from scratch or from other weights, a checkpoint
            vanished, or an error is not one of ours.
    """
    kept, choose = folder / "kept", random.Random(seed)
    shutil.copytree(origin, kept)  # makes the folder, too
    vandal = Vandal(kept, choose)
    vandal.act()
    before, keep = _inventory(folder), choose.choice((1, 3))
    run = Solo(kept, every=2, keep=keep)
    untouched = weights_of(run), run.stride.state_dict()
    try:
        with LogTexts() as reported:
            try:
                restored = run.restore()
            except (CheckpointError, ConfigError) as error:
                assert (weights_of(run), run.stride.state_dict()) == untouched, vandal.done
                assert _inventory(folder) == before, vandal.done
                return Verdict(_kind_of(error), tuple(vandal.done), str(error))
        assert restored is not None, f"from scratch after {vandal.done}"
        assert weights_of(run) == known[restored.step], vandal.done
        newer = {n for p in kept.glob("step-*") if (n := parse_name(p.name))}
        newer = {name for name in newer if name > parse_name(restored.folder)}  # type: ignore[operator]
        text = "\n".join(reported.texts)
        assert all(f"{name} is skipped" in text for name in newer), (vandal.done, text)
        run.train(4)
        run.checkpoint.close()
    finally:
        run.close()
    _require_kept(before, _inventory(folder), restored.folder, keep, vandal)
    return Verdict("fallen back" if newer else "exact", tuple(vandal.done), text)


def _kind_of(error: EvenstrideError) -> str:
    return "refused" if "none of the" in str(error) else "forged"


def _inventory(folder: Path) -> dict[str, object]:
    """Return all that is below a folder, without following or opening what is no file."""
    found: dict[str, object] = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root) / name
            regular = path.is_file() and not path.is_symlink()
            found[str(path.relative_to(folder))] = path.read_bytes() if regular else None
    return found


def _require_kept(
    before: dict[str, object], after: dict[str, object], restored: str, keep: int, vandal: Vandal
) -> None:
    """Check that the run has deleted nothing but what it may.

    That is the restored checkpoint and older ones of the same run, once there are newer ones in
    their place; and what cannot be read by anybody, as table and manifest are gone.
    """
    mine = parse_name(restored)
    assert mine is not None
    for path, data in before.items():
        folder = path.split("/")[1] if path.startswith("kept/step-") else ""
        name = parse_name(folder) if folder else None
        own = name is not None and name.generation == mine.generation and not mine < name
        lost = not {f"kept/{folder}/{file}" for file in FILES[2:]} & before.keys()
        if not (own and keep == 1) and not (folder and lost):
            assert after.get(path, "gone") == data, (path, vandal.done)
