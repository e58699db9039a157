"""Messages between the ranks through the process group's own store.

Every launcher gives the process group a store that all ranks can reach, so no further server or
address is needed. A store client handles one request at a time and blocks while it waits. So there
are three connections. The control thread waits on one, calls that must not wait use another, and
the training thread meets the other ranks on the group's own.

For each new connection, torch looks up the name of the peer on both ends, for log messages that
may never be shown (pytorch/pytorch#159007). Python cannot turn this off. If a name server drops
every fiftieth query, every seventh `Stride` of two ranks takes the resolver's 5 s longer. An entry
in /etc/hosts, or RES_OPTIONS="timeout:1", helps. Connections are still not kept for the next
`Stride`: a connection on which a thread waits serves no other request.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from evenstride.errors import ConfigError, WorkerLost

logger = logging.getLogger("evenstride")

# A rank that waits for the others in a collective call for this time logs a message.
TELL_AFTER = timedelta(seconds=10)
# A control thread waits for the next message until the run ends.
FOREVER = timedelta(days=30)
# A rank that waits for others checks at this interval whether they can still arrive.
LOOK_S = 0.5
# It sleeps between polls of the store: a fraction of the time waited so far, within bounds.
_NAP, _SHORTEST_NAP_S, _LONGEST_NAP_S = 0.02, 0.0002, 0.25
# Polls per second of all ranks together; a store serves several times as many.
_MOST_POLLS = 20_000


@dataclass(slots=True, eq=False)
class Channel:
    """Three connections to the keys of one `Stride`."""

    rank: int  # this rank in the process group
    world_size: int  # ranks in the group
    timeout: timedelta  # the process group's own timeout
    control: Store  # the control thread's connection, on which it waits
    # The group's own connection, on which the training threads agree before training.
    meeting: Store
    prompt: Store  # connection that never waits; threads may share it
    tell_after: timedelta = TELL_AFTER  # time after which `meet` reports that it waits

    def close(self) -> None:
        """Drop the connections now instead of leaving them to the garbage collector.

        The collector may run in a forked loader process. There, deleting objects that the parent's
        threads use causes a crash or a hang.
        """
        del self.control, self.meeting, self.prompt

    def put(self, key: str, text: str) -> None:
        """Set a key without waiting for others."""
        self.prompt.set(key, text)

    def take(self, key: str) -> str:
        """Wait for a key (control thread) and return its text."""
        return bytes(self.control.get(key)).decode()

    def put_all(self, keys: list[str], texts: list[str]) -> None:
        """Set several keys with one request, without waiting for others."""
        self.prompt.multi_set(keys, texts)  # type: ignore[attr-defined]

    def take_all(self, keys: list[str]) -> list[str]:
        """Wait for all keys (control thread) and return their texts."""
        self.control.wait(keys, FOREVER)
        return [bytes(value).decode() for value in self.control.multi_get(keys)]

    def show(self, key: str, text: str) -> None:
        """Set a key for `meet` (training thread)."""
        self.meeting.set(key, text)

    def missing(self, keys: list[str]) -> list[str]:
        """Return those of the keys for `meet` that are missing; one request if none is."""
        if self.all_there(keys):
            return []
        return [key for key in keys if not self.meeting.check([key])]

    def all_there(self, keys: list[str]) -> bool:
        """Return whether all keys for `meet` exist, with one request."""
        return bool(self.meeting.check(keys))

    def meet(
        self,
        keys: list[str],
        timeout: timedelta,
        tell: Callable[[], object] = lambda: None,
        look: Callable[[], object] | None = None,
    ) -> list[str]:
        """Wait for all keys (training thread) and return their texts.

        ``tell`` is called once if the wait takes longer than ``tell_after``. ``look`` is called
        regularly during the wait; an exception from it ends the wait.

        Raises:
            RuntimeError: a key is still missing after ``timeout``, or the store is gone. A missing
                key raises its subclass `torch.distributed.DistStoreError`, except with ``look`` or
                with a store in a file.
        """
        if look is None:
            _wait(self.meeting, keys, timeout, self.tell_after, tell)
        else:
            shortest_s = nap_s(self.world_size, _SHORTEST_NAP_S)
            _poll(self.meeting, keys, timeout, self.tell_after, tell, look, shortest_s)
        return [bytes(value).decode() for value in self.meeting.multi_get(keys)]

    def forget(self, key: str) -> None:
        """Delete a key of `meet` (training thread)."""
        self.meeting.delete_key(key)

    def read(self, keys: list[str]) -> list[str]:
        """Return the texts of keys that are known to exist."""
        return [bytes(value).decode() for value in self.prompt.multi_get(keys)]

    def has(self, keys: list[str]) -> bool:
        """Return whether all keys exist, with one request."""
        return bool(self.prompt.check(keys))

    def present(self, keys: list[str]) -> list[bool]:
        """Return for each key whether it exists."""
        return [self.prompt.check([key]) for key in keys]

    def count(self, key: str) -> int:
        """Return how many ranks have called this with the key, including this call."""
        return int(self.prompt.add(key, 1))

    def uncount(self, key: str) -> None:
        """Delete a key of `count`."""
        self.prompt.delete_key(key)

    def drop(self, key: str) -> None:
        """Delete a key (control thread)."""
        self.control.delete_key(key)


def nap_s(world_size: int, few_s: float) -> float:
    """Return the time between two polls of the store, in seconds: ``few_s`` with few ranks.

    With many ranks, all of them together make at most ``_MOST_POLLS`` requests per second.
    """
    return max(few_s, world_size / _MOST_POLLS)


def open_channel(group: dist.ProcessGroup) -> Channel:
    """Return this rank's channel; collective over the group.

    Raises:
        ConfigError: the group's store does not accept a second connection.
        WorkerLost: rank 0 did not join within the group's timeout.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    # torch has no public access to a group's store; this table has existed since 1.x.
    store = dist.distributed_c10d._world.pg_map[group][1]
    # Ranks create their Strides in the same order, so a rank's own count identifies the Stride.
    count = store.add(f"evenstride/count/{rank}", 1)
    token = agreed_token(store, f"evenstride/token/{count}", rank)
    control, prompt, meeting = (
        PrefixStore(f"evenstride/{token}", client)
        for client in (_connect(store), _connect(store), store)
    )
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    return Channel(rank, world_size, timeout, control, meeting, prompt)


def agreed_token(store: Store, key: str, rank: int, tell_after: timedelta = TELL_AFTER) -> str:
    """Return rank 0's prefix for the keys of this `Stride`."""
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    if rank == 0:
        store.set(key, uuid.uuid4().hex)
    try:
        _wait(store, [key], timeout, tell_after, lambda: tell_of_wait(rank, "Stride()", "rank 0"))
    except dist.DistNetworkError:
        raise
    except RuntimeError as error:
        raise WorkerLost(
            f"rank 0 did not reach Stride() within {timeout.total_seconds():.0f} s; every rank "
            "must create the same Stride and the same loaders in the same order"
        ) from error
    return bytes(store.get(key)).decode()


def _wait(
    store: Store,
    keys: list[str],
    timeout: timedelta,
    tell_after: timedelta,
    tell: Callable[[], object],
) -> None:
    if tell_after < timeout:
        with contextlib.suppress(RuntimeError):  # if the store is gone, the next wait raises
            store.wait(keys, tell_after)
            return
        with contextlib.suppress(RuntimeError):
            tell()
        timeout -= tell_after
    store.wait(keys, timeout)


def _poll(
    store: Store,
    keys: list[str],
    timeout: timedelta,
    tell_after: timedelta,
    tell: Callable[[], object],
    look: Callable[[], object],
    shortest_s: float,
) -> None:
    """Wait as `_wait`, and call ``look`` regularly.

    Polls the store, because torch prints a warning when a wait of the store times out.
    """
    begun_s, silent, looked_s = time.monotonic(), tell_after < timeout, 0.0
    while not store.check(keys):
        waited_s = time.monotonic() - begun_s
        if waited_s >= timeout.total_seconds():
            raise RuntimeError(f"timed out waiting for the store keys {keys}")
        if silent and waited_s >= tell_after.total_seconds():
            silent = False
            tell()
        if waited_s >= looked_s + LOOK_S:
            looked_s = waited_s
            look()
        time.sleep(max(min(waited_s * _NAP, _LONGEST_NAP_S), shortest_s))


def tell_of_wait(rank: int, call: str, others: str) -> None:
    """Log that a rank waits for ``others`` in a collective call."""
    logger.warning(
        "rank %d waits in %s for %s; every rank must make the same calls in the same order, and "
        "a rank that waits gives up at the process group's timeout",
        rank,
        call,
        others,
    )


def tcp_store(store: Store, why: str) -> TCPStore:
    """Return the TCP store beneath a process group's store; other processes can connect to it.

    Raises:
        ConfigError: the store is of another kind. ``why`` in its message says what needs one.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return store
    raise ConfigError(
        f"the process group's store is a {type(store).__name__}; {why}: launch with torchrun, or "
        "pass init_method='tcp://HOST:PORT' or 'env://'"
    )


def _connect(store: Store) -> Store:
    """Return a second client of the store's server."""
    client: Store
    if hasattr(store, "clone"):
        client = store.clone()
    else:  # before torch 2.7 only a TCP store accepts a second client
        server = tcp_store(store, "with this version of torch evenstride needs a TCP store")
        client = TCPStore(server.host, server.port, None, False)
    client.set_timeout(FOREVER)
    return client


class LocalChannel:
    """The part of `Channel` that exchanges need, for a single process without other ranks."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        self._texts[key] = text

    def put_all(self, keys: list[str], texts: list[str]) -> None:
        self._texts.update(zip(keys, texts, strict=True))

    def take(self, key: str) -> str:
        return self._texts[key]

    def take_all(self, keys: list[str]) -> list[str]:
        return [self._texts[key] for key in keys]

    def present(self, keys: list[str]) -> list[bool]:
        return [key in self._texts for key in keys]

    def drop(self, key: str) -> None:
        self._texts.pop(key, None)

    def close(self) -> None:
        """Nothing to close."""
