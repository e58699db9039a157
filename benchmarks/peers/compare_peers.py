"""Compare evenstride with other systems that train data-parallel, in the same run.

    python benchmarks/peers/compare_peers.py --prepare [--venvs FOLDER]
    python benchmarks/peers/compare_peers.py [--peers A,B] [--measures A,B] [--rounds N]
        [--minutes M] [--venvs FOLDER] [--out FILE] [--quick]
    python benchmarks/peers/compare_peers.py --page

All systems train the same model on the same data with the same global batch and optimizer. Each has
a virtual environment of its own, and three workers under the same CPU limits. `--prepare` creates
the environments; they share the PyTorch of the Python that runs this script.

Measures:

* uneven: Workers of 1, 0.5 and 0.2 of a core. Samples per second, the time to a training loss, and
  the work lost when the fastest and the slowest worker swap their speeds.
* equal: Three workers of 0.5 of a core. Samples per second.
* by-hand: The error of the gradient when the user gives the workers 7, 4 and 1 samples.
* tail: The error of the last gradient of an epoch that has 5 samples left for 24 places.
* death: A worker is killed. Seconds until the next update, less the usual time of one.

In each round, all systems run one after the other, in another order each time. Between them, all
workers train alone at the same time; the sum of these speeds is what `share` refers to. A block is
disturbed if the sum changed by more than 10 % from before to after it. It is repeated once if time
allows, and stays in the file.

The file is written after each block. A later run with the same file adds the blocks it lacks, so
`--minutes` may split a comparison. What fails is stored with its error. `--quick` rehearses.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers.peer_blocks import (
    BATCH,
    EQUAL,
    GOAL_LOSS,
    HERE,
    ROOT,
    UNEVEN,
    Block,
    Lengths,
    PeerError,
)
from benchmarks.peers.peer_figures import disturbed
from benchmarks.peers.peer_page import page

from evenstride.errors import EvenstrideError
from evenstride.lab.processes.speeds import Speeds, check_fit, usable_cpus

RESULTS = HERE / "results.json"
PAGE = ROOT / "docs" / "records" / "peers.md"
VENVS = Path("~/.cache/evenstride/peers")
TIMED: dict[str, Speeds] = {"uneven": UNEVEN, "equal": EQUAL}
MEASURES = ("by-hand", "tail", "death", *TIMED)
QUICK = Lengths(2.0, 5.0, 8.0, 1.0, 3.0, 0.5, 1.5, 4.0)
RARE = ("by-hand", "tail", "death", "equal")  # not measured for variants of a system
LAST_LINES = 3


@dataclass(frozen=True, slots=True)
class Peer:
    """A system to compare.

    Args:
        adapter: Its script, without ``_peer.py``.
        venv: Its virtual environment and the file of its requirements.
        option: For the adapter.
        without: Measures that mean nothing for it.
    """

    adapter: str
    venv: str
    option: str = ""
    without: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        """Its adapter."""
        return HERE / f"{self.adapter}_peer.py"


# hivemind's peers draw samples of their own, so it has no epochs. AdaptDL has one batch for all. A
# worker of the live mode may join an update later, so that its updates have other numbers.
PEERS = {
    "ddp": Peer("ddp", "ddp"),
    "accelerate": Peer("accelerate", "accelerate"),
    "lightning": Peer("lightning", "lightning"),
    "torchft": Peer("torchft", "torchft"),
    "torchft-0.2.0": Peer("torchft", "live", "", ("by-hand", "tail", "uneven", "equal")),
    "adaptdl": Peer("adaptdl", "adaptdl", without=("by-hand",)),
    "adaptdl-autoscale": Peer("adaptdl", "adaptdl", "autoscale", RARE),
    "hivemind": Peer("hivemind", "hivemind", without=("tail",)),
    "hivemind-10": Peer("hivemind", "hivemind", "10", RARE),
    "dbs": Peer("published", "ddp", "dbs"),
    "omnilearn": Peer("published", "ddp", "omnilearn"),
    "evenstride": Peer("evenstride", "ddp"),
    "evenstride-live": Peer("evenstride", "live", "live", ("by-hand", "tail")),
}


@dataclass(slots=True)
class Comparison:
    """Runs the blocks that a file lacks.

    Args:
        out: The file.
        venvs: Folder of the virtual environments.
        ends_s: When to start no more blocks, on the monotonic clock.
        lengths: Of the phases of a block.
        stored: What the file has.
    """

    out: Path
    venvs: Path
    ends_s: float
    lengths: Lengths
    stored: dict[str, Any] = field(default_factory=dict)
    _sums: dict[Speeds, tuple[float, float]] = field(default_factory=dict)
    _folder: Path = Path()
    _number: int = 0
    _longest_s: dict[str, float] = field(default_factory=dict)

    def run(self, peers: Sequence[str], measures: Sequence[str], rounds: int) -> None:
        """Run what is missing, round by round, then repeat disturbed blocks once."""
        self.stored = {**heading(), **read(self.out)}
        self.stored.setdefault("blocks", [])
        with tempfile.TemporaryDirectory(prefix="evenstride-") as folder:
            self._folder = Path(folder)
            for number, measure, peer in wanted(peers, measures, rounds):
                if not attempts(self.stored["blocks"], number, measure, peer):
                    self.block(number, measure, peer)
            for number, measure, peer in wanted(peers, measures, rounds):
                tried = attempts(self.stored["blocks"], number, measure, peer)
                if len(tried) == 1 and tried[0]["disturbed"]:
                    self.block(number, measure, peer)

    def block(self, number: int, measure: str, peer: str) -> None:
        """Run and store a block, if there is time."""
        now_s = time.monotonic()
        if now_s + self._longest_s.get(measure, 0.0) > self.ends_s:
            return
        before = self.sum_of(measure)
        found = self.figures(peer, measure)
        self._sums.pop(TIMED.get(measure, ()), None)
        after = self.sum_of(measure)
        took_s = time.monotonic() - now_s
        self._longest_s[measure] = max(took_s, self._longest_s.get(measure, 0.0))
        block = {"round": number, "measure": measure, "peer": peer, **found}
        sums = None if before is None or after is None else (before, after)
        block |= {"sums": sums, "disturbed": sums is not None and disturbed(*sums)}
        self.stored["blocks"].append(block)
        self.out.write_text(json.dumps(self.stored, indent=1) + "\n")
        print(f"{took_s:5.1f} s {json.dumps(block)}", file=sys.stderr, flush=True)

    def sum_of(self, measure: str) -> float | None:
        """Return the sum of the workers' speeds, measured now or just before."""
        if (speeds := TIMED.get(measure)) is None:
            return None
        known = self._sums.get(speeds)
        # One that follows a block also precedes the next one.
        if known is None or time.monotonic() - known[0] > 2.0:
            try:
                total = self.start("alone", PEERS["ddp"]).alone(speeds)
            except PeerError:
                total = 0.0  # the machine is too busy, so the block is disturbed
            known = self._sums[speeds] = (time.monotonic(), total)
        return known[1]

    def figures(self, peer: str, measure: str) -> dict[str, Any]:
        """Return the figures of a block, or the error that prevented them."""
        block = self.start(PEERS[peer].adapter, PEERS[peer])
        run: Callable[[], dict[str, Any]] = getattr(block, measure.replace("-", "_"))
        try:
            return {"figures": run(), "error": None}
        except (PeerError, EvenstrideError, OSError) as error:
            return {"figures": None, "error": str(error)}

    def start(self, adapter: str, peer: Peer) -> Block:
        """Return a block in a folder of its own."""
        self._number += 1
        folder = self._folder / f"{self._number}"
        script = replace(peer, adapter=adapter).script
        return Block(python_of(self.venvs / peer.venv), script, peer.option, folder, self.lengths)


def wanted(
    peers: Sequence[str], measures: Sequence[str], rounds: int
) -> Iterator[tuple[int, str, str]]:
    """Yield round, measure and peer of each block.

    The order of the peers rotates, and is reversed in every other round, so that a drift cancels.
    """
    for number in range(rounds):
        first = number // 2 % len(peers)
        order = [*peers[first:], *peers[:first]]
        for measure in measures:
            for peer in reversed(order) if number % 2 else order:
                if measure not in PEERS[peer].without:
                    yield number, measure, peer


def attempts(
    blocks: Sequence[dict[str, Any]], number: int, measure: str, peer: str
) -> list[dict[str, Any]]:
    """Return the blocks of a round, measure and peer."""
    key = (number, measure, peer)
    return [one for one in blocks if (one["round"], one["measure"], one["peer"]) == key]


def read(file: Path) -> dict[str, Any]:
    """Return what a file has, or nothing."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def heading() -> dict[str, Any]:
    """Return how the comparison is made."""
    return {
        "date": time.strftime("%-d %B %Y"),
        "torch": version("torch"),
        "speeds": {name: list(speeds) for name, speeds in TIMED.items()},
        "batch": BATCH,
        "goal_loss": GOAL_LOSS,
        "installs": {},
    }


def python_of(folder: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return folder / "bin" / "python"


def prepare(venvs: Path) -> dict[str, str]:
    """Create the virtual environments; return the error of each that failed."""
    shared, failed = Path(version_file("torch")), dict[str, str]()
    for name in sorted({peer.venv for peer in PEERS.values()}):
        folder = venvs / name
        venv.create(folder, with_pip=True)
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "shared.pth").write_text(f"{shared}\n")
        pip = [str(python_of(folder)), "-m", "pip", "install"]
        files = ["--constraint", str(ROOT / "constraints.txt")]
        files += ["--requirement", str(HERE / "requirements" / f"{name}.txt")]
        done = subprocess.run([*pip, *files], capture_output=True, text=True)
        if done.returncode:
            failed[name] = " ".join(done.stderr.strip().splitlines()[-LAST_LINES:])
        print(f"{name}: {failed.get(name, 'installed')}", file=sys.stderr)
    return failed


def version_file(package: str) -> str:
    """Return the folder from which this Python imports a package."""
    from importlib.util import find_spec

    spec = find_spec(package)
    assert spec is not None, "this script needs it"
    assert spec.origin is not None, "it has files"
    return str(Path(spec.origin).parents[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare, compare, or write the page."""
    args = parse(argv)
    if args.page:
        PAGE.write_text(page(read(args.out)))
        return 0
    venvs = args.venvs.expanduser()
    if args.prepare:
        stored = {**heading(), **read(args.out), "installs": prepare(venvs)}
        args.out.write_text(json.dumps(stored, indent=1) + "\n")
        return int(bool(stored["installs"]))
    for speeds in TIMED.values():
        check_fit(speeds, usable_cpus())
    ends_s = time.monotonic() + 60.0 * args.minutes
    # hivemind's own processes would outlive a killed runner.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    lengths = QUICK if args.quick else Lengths()
    Comparison(args.out, venvs, ends_s, lengths).run(args.peers, args.measures, args.rounds)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""

    def names(known: Sequence[str]) -> Callable[[str], list[str]]:
        def chosen(text: str) -> list[str]:
            found = text.split(",")
            if unknown := sorted(set(found) - set(known)):
                raise argparse.ArgumentTypeError(
                    f"unknown {', '.join(unknown)}; expected some of {', '.join(known)}"
                )
            return found

        return chosen

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prepare", action="store_true", help="create the virtual environments")
    parser.add_argument("--page", action="store_true", help="write docs/records/peers.md")
    parser.add_argument("--venvs", type=Path, default=VENVS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--peers", type=names(tuple(PEERS)), default=list(PEERS))
    parser.add_argument("--measures", type=names(MEASURES), default=list(MEASURES))
    parser.add_argument("--quick", action="store_true", help="short phases; figures mean nothing")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
