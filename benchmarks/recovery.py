"""Measure the time until the survivors of a lost host train again, and other costs of the loss.

    python benchmarks/recovery.py --rounds 5 --signal kill

Three hosts train under torchrun agents, whose store is on a fourth host that stays. The hosts are
network and process namespaces, so this needs root. One host is ended. The recovery time ends when
the others have committed a new step. Three ways alternate in one run: a plain script with the
defaults of torchrun, the same with tuned timeouts, and evenstride with ``evenstride launch``.
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

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.network_namespaces import Host, cannot_have_hosts, hosts

SCRIPT = Path(__file__).with_name("recovery_script.py")
WAYS = ("defaults", "tuned", "evenstride")
STAGES = ("noticed", "ended", "started", "imported", "joined")
PORT, HOSTS = 29400, 3
# Steps before the loss, not a multiple of the steps at which both scripts save.
BEFORE, SAMPLES = 36, 5760
PATIENCE_S = 180.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}


@dataclass(frozen=True, slots=True)
class Loss:
    """The costs of one loss.

    Args:
        way: Way of training.
        recovery_s: Time from the end of the host to the next committed step.
        recomputed: Samples that were trained again.
        lost: Samples of the epoch that its committed steps left out.
        repeated: Samples that the committed steps trained more than once.
        before_s: Median step time before the loss.
        after_s: Median step time after the loss.
        batch_after: Samples per step after the loss.
        stages_s: Times, from the end of the host, at which the slower survivor had noticed the
            loss, ended, started again, imported its modules, and joined the new group.
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
    """Return the torchrun command of a host."""
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


def noted(folder: Path) -> list[dict[str, Any]]:
    """Return the notes of all ranks so far, without incomplete lines."""
    lines: list[dict[str, Any]] = []
    for path in folder.glob("*-*.jsonl"):
        texts = path.read_text().splitlines(keepends=True)
        lines += [json.loads(text) for text in texts if text.endswith("\n")]
    return lines


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Poll until a condition is true.

    Raises:
        TimeoutError: It is not true within `PATIENCE_S`.
    """
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} within {PATIENCE_S:.0f} s")
        time.sleep(0.05)


def lose_a_host(way: str, victim: int, signal: str, folder: Path, rate_mbit: float) -> Loss:
    """Train on all hosts, end one, and return the costs of the loss."""
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
        wait_until(lambda: last_step(noted(folder), HOSTS) >= BEFORE, "training did not start")
        first = {line["generation"] for line in noted(folder)}
        ended_s = time.time()
        if signal == "kill":
            many[victim].kill()
        else:
            many[victim].terminate()

        def again() -> bool:
            new = [line for line in noted(folder) if line["generation"] not in first]
            return any(line["world"] == HOSTS - 1 for line in new)

        wait_until(again, "the survivors did not resume training")
        begun = {line["generation"] for line in noted(folder)} - first

        def enough() -> bool:
            return any(line["epoch"] > 0 for line in noted(folder) if line["generation"] in begun)

        wait_until(enough, "the survivors did not finish the epoch")
    return loss_of(way, noted(folder), first, ended_s, stages_of(folder, ended_s))


def stages_of(folder: Path, ended_s: float) -> dict[str, float]:
    """Return the times at which the slower survivor reached each stage, in seconds."""
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
    """Return the latest step that ``world`` ranks have committed together."""
    done = Counter(line["step"] for line in lines if line["world"] == world)
    return max((step for step, ranks in done.items() if ranks == world), default=0)


def loss_of(
    way: str,
    lines: list[dict[str, Any]],
    first: set[str],
    ended_s: float,
    stages_s: dict[str, float],
) -> Loss:
    """Return the costs of a loss, from the notes of the ranks."""
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
        before_s=_step_s(before),
        after_s=_step_s(after),
        batch_after=round(
            sum(len(line["ids"]) for line in after) / len({line["step"] for line in after})
        ),
        stages_s=stages_s,
    )


def _step_s(lines: list[dict[str, Any]]) -> float:
    at = sorted({line["step"]: line["at"] for line in lines}.items())
    gaps = [b - a for (_, a), (_, b) in pairwise(at[5:])]
    return statistics.median(gaps) if gaps else 0.0


def main() -> int:
    """Run all rounds and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Verbatim)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--signal", choices=("kill", "term"), default="kill")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rate-mbit", type=float, default=1000.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    why = cannot_have_hosts()
    if why:
        print(f"not run: {why}")
        return 2
    losses: list[Loss] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for way in args.ways:
                place = Path(folder) / f"{way}-{number}"
                loss = lose_a_host(way, number % HOSTS, args.signal, place, args.rate_mbit)
                losses.append(loss)
                print(f"round {number + 1} {loss}", flush=True)
    for way in args.ways:
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
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(loss) for loss in losses]))
    return 0


class _Verbatim(argparse.RawDescriptionHelpFormatter):
    """Shows the docstring without wrapping."""


if __name__ == "__main__":
    sys.exit(main())
