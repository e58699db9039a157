"""Messages between the ranks through the process group's own store.

Every launcher gives the process group a store that all ranks can reach, so nothing new has to
listen and no address has to be found. A store client serves one request at a time and blocks
while it waits. So the control thread has a connection of its own to wait on, everything that
must not wait has another, and the training thread meets the other ranks on the group's own.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from evenstride.errors import ConfigError

# A control thread waits for the next message for as long as the run lasts.
FOREVER = timedelta(days=30)


@dataclass(slots=True, eq=False)
class Channel:
    """Three connections to the keys of one `Stride`.

    Args:
        rank: this rank in the process group.
        world_size: ranks in the group.
        timeout: the process group's own timeout.
        control: the control thread's connection, on which it waits.
        meeting: the group's own connection, on which the training threads agree before training.
        prompt: the connection that never does; safe to share between threads.
    """

    rank: int
    world_size: int
    timeout: timedelta
    control: Store
    meeting: Store
    prompt: Store

    def close(self) -> None:
        """Drop the connections now, rather than whenever the garbage collector gets to them.

        It may get to them in a forked data-loader process, where taking down what belongs to
        the parent's threads ends in a crash or a hang.
        """
        del self.control, self.meeting, self.prompt

    def put(self, key: str, text: str) -> None:
        """Set a key without waiting for an answer."""
        self.prompt.set(key, text)

    def take(self, key: str) -> str:
        """Wait for a key (control thread) and return its text."""
        return bytes(self.control.get(key)).decode()

    def take_all(self, keys: list[str]) -> list[str]:
        """Wait for all keys (control thread) and return their texts."""
        self.control.wait(keys, FOREVER)
        return [bytes(value).decode() for value in self.control.multi_get(keys)]

    def show(self, key: str, text: str) -> None:
        """Set a key for `meet` (training thread)."""
        self.meeting.set(key, text)

    def missing(self, keys: list[str]) -> list[str]:
        """Return those of the keys for `meet` that are not there."""
        return [key for key in keys if not self.meeting.check([key])]

    def meet(self, keys: list[str], timeout: timedelta) -> list[str]:
        """Wait for all keys (training thread) and return their texts.

        Raises:
            torch.distributed.DistStoreError: some key did not come in time.
        """
        self.meeting.wait(keys, timeout)
        return [bytes(value).decode() for value in self.meeting.multi_get(keys)]

    def read(self, keys: list[str]) -> list[str]:
        """Return the texts of keys that are known to be there."""
        return [bytes(value).decode() for value in self.prompt.multi_get(keys)]

    def present(self, keys: list[str]) -> list[bool]:
        """Return for each key whether it is there."""
        return [self.prompt.check([key]) for key in keys]

    def drop(self, key: str) -> None:
        """Delete a key (control thread)."""
        self.control.delete_key(key)


def open_channel(group: dist.ProcessGroup) -> Channel:
    """Return this rank's channel; collective over the group.

    Raises:
        ConfigError: the group has no store that a second connection can be opened to.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    # torch has no public way to a group's store; this table has been in place since 1.x.
    store = dist.distributed_c10d._world.pg_map[group][1]
    # Ranks make their strides in the same order, so a rank's own count names the stride.
    count = store.add(f"evenstride/count/{rank}", 1)
    if rank == 0:
        store.set(f"evenstride/token/{count}", uuid.uuid4().hex)
    token = bytes(store.get(f"evenstride/token/{count}")).decode()
    control, prompt, meeting = (
        PrefixStore(f"evenstride/{token}", client)
        for client in (_connect(store), _connect(store), store)
    )
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    return Channel(rank, world_size, timeout, control, meeting, prompt)


def _connect(store: Store) -> Store:
    """Return a second client of the store's server."""
    client: Store
    if hasattr(store, "clone"):
        client = store.clone()
    else:  # before torch 2.7 only a TCP store can be reached a second time
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            raise ConfigError(
                f"the process group's store is a {type(store).__name__}; with this version of "
                "torch evenstride needs a TCP store: launch with torchrun, or pass "
                "init_method='tcp://HOST:PORT' or 'env://'"
            )
        client = TCPStore(store.host, store.port, None, False)
    client.set_timeout(FOREVER)
    return client
