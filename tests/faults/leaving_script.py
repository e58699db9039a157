"""A training script without common steps in which rank 1 leaves, between two epochs or before.

leaving_script.py FOLDER FATE: what becomes of rank 1, of three:

* notified, stopped: SIGTERM or SIGSTOP in its third step, for which the others wait;
* evaluating: killed when the first epoch has ended, before it is saved;
* saving, hanging: killed or stopped when the others save already, and wait for it;
* averaging: stopped when the first epoch is saved, before the mean that the others wait for.

Every rank writes a line with the samples of each update once it is made; after each epoch all save
and take a mean, as far as they can.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.faults.served_script import EPOCHS, loss_of, rows, trained

GROUP_TIMEOUT_S = 300.0
SIGNALS = {
    "notified": signal.SIGTERM,
    "stopped": signal.SIGSTOP,
    "evaluating": signal.SIGKILL,
    "saving": signal.SIGKILL,
    "hanging": signal.SIGSTOP,
    "averaging": signal.SIGSTOP,
}


def leave_early(fate: str, rank: int, made: int) -> None:
    """Let rank 1 go in its third step, and the others wait: they could end the epoch before."""
    store = dist.distributed_c10d._get_default_store()
    if rank != 1:
        store.wait(["fate"])
    elif made == 2:
        store.set("fate", "")
        os.kill(os.getpid(), SIGNALS[fate])


def leave_while_saving(checkpoint: Any, rank: int, fate: str) -> None:
    """Let rank 1 go when the others have found all ranks there."""
    ties, store = checkpoint._ties, dist.distributed_c10d._get_default_store()
    complete = ties.complete

    def completed() -> bool:
        there: bool = complete()
        if rank == 1:
            store.wait(["saving/0", "saving/2"])
            os.kill(os.getpid(), SIGNALS[fate])
        elif there:
            store.set(f"saving/{rank}", "")
        return there

    ties.complete = completed


def outcome(call: Any, *arguments: Any) -> str:
    """Return what a call came to."""
    try:
        return str(call(*arguments))
    except evenstride.WorkerLost as lost:
        return f"WorkerLost: {lost}"


def await_other(rank: int) -> None:
    """Wait for the other survivor: who has ended in order is gone, too."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done/{rank}", "")
    store.wait(["done/0", "done/2"])


def main(folder: Path, fate: str) -> None:
    """Train, save and take a mean after each epoch, and note how that went."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    rank = dist.get_rank()
    stride = evenstride.Stride(global_batch=12, sync="asp", policy="static:3,4,5")
    loader = stride.loader(rows())
    validation = stride.loader(rows(), train=False)
    net, optimizer = trained()
    model = stride.watch(DistributedDataParallel(net))
    checkpoint = evenstride.Checkpointer(
        folder / "saved", stride, model=model, optimizer=optimizer, every=5
    )
    if fate in ("saving", "hanging"):
        leave_while_saving(checkpoint, rank, fate)
    made, ends = 0, []
    with (folder / f"trained-{rank}.jsonl").open("a") as file:
        for epoch in range(EPOCHS):
            for ids, x in loader:
                stride.scale(loss_of(model, x)).backward()  # type: ignore[no-untyped-call]
                if fate in ("notified", "stopped"):
                    leave_early(fate, rank, made)
                optimizer.step()
                optimizer.zero_grad()
                made += 1
                file.write(json.dumps({"epoch": epoch, "ids": ids.tolist()}) + "\n")
                file.flush()
                checkpoint.step()
            if rank == 1 and fate == "evaluating":
                os.kill(os.getpid(), SIGNALS[fate])
            saved = outcome(checkpoint.save)
            if rank == 1 and fate == "averaging":
                os.kill(os.getpid(), SIGNALS[fate])
            mean = outcome(stride.mean, 1.0, 1)
            seen = [i for ids, _ in validation for i in ids.tolist()]
            ends.append({"save": saved, "mean": mean, "seen": seen})
    checkpoint.close()
    (folder / f"end-{rank}.json").write_text(json.dumps(ends))
    await_other(rank)
    stride.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
