"""How long survivors of a lost host need to train again, and what the loss costs besides.

    python benchmarks/recovery.py --rounds 5 --signal kill

Three hosts (network and process namespaces, so root only) train under torchrun agents that meet
in a store on a fourth, which stays. One host is ended; the time counts until the others have
committed a new step. Three ways take turns in one run: a plain script under torchrun's defaults,
the same under tuned timeouts, and evenstride under ``evenstride launch``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from evenstride.lab.processes.torchrun import (
    Request,
    StoreEndpoint,
    Torchrun,
    offers_of_torch,
    torchrun,
)

# A script finds its own folder only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.network_namespaces import Host, cannot_have_hosts, hosts

SCRIPT = Path(__file__).with_name("recovery_script.py")
WAYS = ("defaults", "tuned", "evenstride")
STAGES = ("noticed", "ended", "started", "imported", "joined")
PORT, HOSTS = 29400, 3
# Steps before the loss, off the multiples at which both scripts save.
BEFORE, SAMPLES = 36, 5760
PATIENCE_S = 180.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}


@dataclass(frozen=True, slots=True)
class Loss:
    """What one loss came to.

    Args:
        way: how they trained.
        recovery_s: from the end of the host to the next committed step.
        recomputed: samples that were trained again.
        lost: samples of the epoch that its committed steps left out.
        repeated: samples that they trained more than once.
        before_s: median time of a step before the loss.
        after_s: the same after it.
        batch_after: samples of a step after it.
        stages_s: when the slower of the survivors had noticed the loss, had ended, was started
            again, had imported what it needs and joined the new group, since the end of the host.
    """

    way: str
    recovery_s: float
    recomputed: int
    lost: int
    repeated: int
    before_s: float
    after_s: float
    batch_after: int
    stages_s: dict[str, float]


def command_of(way: str, folder: Path, store: Host, host: Host) -> Torchrun:
    """Return what runs on a host."""
    script = (str(SCRIPT), str(folder), "evenstride" if way == "evenstride" else "plain")
    endpoint = StoreEndpoint(store.address, PORT)
    if way != "defaults":
        request = Request(
            script, (1, HOSTS), "1", endpoint, folder.name, spot=True, address=host.address
        )
        return torchrun(request, offers_of_torch())
    arguments = (
        f"--nnodes=1:{HOSTS}",
        "--nproc-per-node=1",
        "--max-restarts=100",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={folder.name}",
        "--rdzv-conf=is_host=0",
        f"--local-addr={host.address}",
    )
    return Torchrun((*arguments, *script), ())


def told(folder: Path) -> list[dict[str, Any]]:
    """Return what all ranks have noted so far, whole lines only."""
    lines: list[dict[str, Any]] = []
    for path in folder.glob("*-*.jsonl"):
        texts = path.read_text().splitlines(keepends=True)
        lines += [json.loads(text) for text in texts if text.endswith("\n")]
    return lines


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Look again and again.

    Raises:
        TimeoutError: it took too long.
    """
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} within {PATIENCE_S:.0f} s")
        time.sleep(0.05)


def lose_a_host(way: str, victim: int, signal: str, folder: Path, rate_mbit: float) -> Loss:
    """Train on all hosts, lose one, and return what that came to."""
    folder.mkdir()
    with hosts(HOSTS, rate_mbit=rate_mbit) as (store, many):
        serve = "from evenstride.cli.main import main; main()"
        store.start(
            [sys.executable, "-c", serve, "launch", "--store-only", "--store", store.address],
            ENVIRONMENT,
            folder / "store.log",
        )
        for host in many:
            run = command_of(way, folder, store, host)
            module = (
                "torch.distributed.run"
                if way == "defaults"
                else "evenstride.lab.processes.rendezvous"
            )
            words = [sys.executable, "-m", module, *run.arguments]
            environment = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            host.start(words, environment, folder / f"{host.name}.log")
        wait_until(lambda: last_step(told(folder), HOSTS) >= BEFORE, "no training")
        first = {line["generation"] for line in told(folder)}
        ended_s = time.time()
        if signal == "kill":
            many[victim].kill()
        else:
            many[victim].terminate()

        def again() -> bool:
            new = [line for line in told(folder) if line["generation"] not in first]
            return any(line["world"] == HOSTS - 1 for line in new)

        wait_until(again, "the survivors did not train again")
        begun = {line["generation"] for line in told(folder)} - first

        def enough() -> bool:
            return any(line["epoch"] > 0 for line in told(folder) if line["generation"] in begun)

        wait_until(enough, "the survivors stopped again")
    return loss_of(way, told(folder), first, ended_s, stages_of(folder, ended_s))


def stages_of(folder: Path, ended_s: float) -> dict[str, float]:
    """Return when the slower of the survivors had come to each stage, in seconds."""
    lines = [
        json.loads(text)
        for path in folder.glob("*-stages.json")
        for text in path.read_text().splitlines()
    ]
    return {
        stage: max((line["at"] for line in lines if line["stage"] == stage), default=0.0) - ended_s
        for stage in STAGES
    }


def last_step(lines: list[dict[str, Any]], world: int) -> int:
    """Return the latest step that so many ranks have committed together."""
    done = Counter(line["step"] for line in lines if line["world"] == world)
    return max((step for step, ranks in done.items() if ranks == world), default=0)


def loss_of(
    way: str,
    lines: list[dict[str, Any]],
    first: set[str],
    ended_s: float,
    stages_s: dict[str, float],
) -> Loss:
    """Return what a loss came to, by what the ranks have noted."""
    before = [line for line in lines if line["generation"] in first]
    after = [line for line in lines if line["generation"] not in first and line["at"] > ended_s]
    resumed = min(line["step"] for line in after)
    undone = [line for line in before if line["step"] >= resumed]
    epoch = [line for line in before if line["step"] < resumed] + after
    ids = Counter(i for line in epoch if line["epoch"] == 0 for i in line["ids"])
    return Loss(
        way=way,
        recovery_s=min(line["at"] for line in after) - ended_s,
        recomputed=sum(len(line["ids"]) for line in undone),
        lost=SAMPLES - len(ids),
        repeated=sum(count - 1 for count in ids.values()),
        before_s=_pace_s(before),
        after_s=_pace_s(after),
        batch_after=round(
            sum(len(line["ids"]) for line in after) / len({line["step"] for line in after})
        ),
        stages_s=stages_s,
    )


def _pace_s(lines: list[dict[str, Any]]) -> float:
    at = sorted({line["step"]: line["at"] for line in lines}.items())
    gaps = [b - a for (_, a), (_, b) in pairwise(at[5:])]
    return statistics.median(gaps) if gaps else 0.0


def main() -> int:
    """Run all rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Verbatim)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--signal", choices=("kill", "term"), default="kill")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rate-mbit", type=float, default=1000.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    why = cannot_have_hosts()
    if why:
        print(f"not run: {why}")
        return 2
    losses: list[Loss] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.rounds):
            for way in asked.ways:
                place = Path(folder) / f"{way}-{number}"
                loss = lose_a_host(way, number % HOSTS, asked.signal, place, asked.rate_mbit)
                losses.append(loss)
                print(f"round {number + 1} {loss}", flush=True)
    for way in asked.ways:
        mine = [loss for loss in losses if loss.way == way]
        times_s = [loss.recovery_s for loss in mine]
        print(
            f"{way:>10}: median {statistics.median(times_s):.1f} s "
            f"({min(times_s):.1f} to {max(times_s):.1f}), recomputed "
            f"{statistics.median(loss.recomputed for loss in mine):.0f}, lost "
            f"{max(loss.lost for loss in mine)}, repeated {max(loss.repeated for loss in mine)}, "
            f"step {1e3 * statistics.median(loss.before_s for loss in mine):.0f} ms before and "
            f"{1e3 * statistics.median(loss.after_s for loss in mine):.0f} ms after, batch "
            f"{mine[0].batch_after}; "
            + ", ".join(
                f"{stage} {statistics.median(loss.stages_s[stage] for loss in mine):.1f} s"
                for stage in STAGES
            )
        )
    if asked.out is not None:
        asked.out.write_text(json.dumps([asdict(loss) for loss in losses]))
    return 0


class _Verbatim(argparse.RawDescriptionHelpFormatter):
    """Help with the lines of the docstring."""


if __name__ == "__main__":
    sys.exit(main())
