"""hivemind: every peer accumulates gradients at its own speed towards a common batch.

Option: a number by which that batch is larger. hivemind recommends very large ones.
"""

from __future__ import annotations

import json

import hivemind
import torch.nn.functional as F
from benchmarks.peers.peer_worker import PeerJob, work
from torch.utils.data import DataLoader

MATCHMAKING_S = 1.0
LONG = 100  # batches of the user's sizes in one
STEPS = 4  # of an equal worker towards the common batch


def train(job: PeerJob) -> None:
    own = dict[str, hivemind.DHT]()

    def start(known: list[str]) -> hivemind.DHT:
        return hivemind.DHT(
            initial_peers=known, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True, use_relay=False
        )

    def first() -> str:
        own["dht"] = start([])
        return json.dumps([str(address) for address in own["dht"].get_visible_maddrs()])

    known = json.loads(job.published("peers", first))
    dht = own.get("dht") or start(known)
    size = job.size if job.plan.by_hand else max(1, job.size // STEPS)
    # A batch of a few milliseconds is over before the peers have met.
    many = LONG if job.plan.by_hand else int(job.plan.option or 1)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="peers",
        batch_size_per_step=size,
        target_batch_size=job.plan.batch * many,
        params=job.net.parameters(),
        optimizer=job.optimizer,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=15.0,
        averager_opts={"request_timeout": 0.5 * MATCHMAKING_S},
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2},
    )
    job.meet()  # a peer that starts earlier trains alone
    job.forget_updates()  # one without gradients has initialised the optimizer
    loader = DataLoader(job.data, batch_size=size, shuffle=True, drop_last=True)
    while True:
        for ids, x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(job.net(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            job.note(ids, loss)


if __name__ == "__main__":
    work(train)
