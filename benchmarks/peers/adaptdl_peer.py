"""AdaptDL (Pollux) outside its cluster: all replicas have the same batch. Option: autoscaling."""

from __future__ import annotations

import os

# Its modules read these when they are imported.
os.environ["ADAPTDL_REPLICA_RANK"] = os.environ["RANK"]
os.environ["ADAPTDL_NUM_REPLICAS"] = os.environ["WORLD_SIZE"]
os.environ["ADAPTDL_NUM_NODES"] = "1"
os.environ["ADAPTDL_MASTER_ADDR"] = "127.0.0.1"
# It serves a store of its own, for which all ranks would wait with this.
del os.environ["TORCHELASTIC_USE_AGENT_STORE"]

import adaptdl.torch as adl
import portpicker
import torch.nn.functional as F
from benchmarks.peers.peer_worker import PeerJob, work

AUTOSCALE = "autoscale"
ENDLESS = 1_000_000


def train(job: PeerJob) -> None:
    port = job.published("port", lambda: str(portpicker.pick_unused_port()))
    os.environ["ADAPTDL_MASTER_PORT"] = port
    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(job.data, batch_size=job.plan.batch, shuffle=True)
    if job.plan.option == AUTOSCALE:
        most = 4 * job.plan.batch
        loader.autoscale_batch_size(most, local_bsz_bounds=(8, most), gradient_accumulation=True)
    optimizer = job.optimizer(job.net.parameters())
    model = adl.AdaptiveDataParallel(job.net, optimizer)
    for _ in adl.remaining_epochs_until(ENDLESS):
        for ids, x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            job.note(ids, loss)


if __name__ == "__main__":
    work(train)
