"""Which parameter server holds which parameter."""

from __future__ import annotations

from collections.abc import Sequence

from evenstride.errors import ConfigError


def place(sizes_bytes: Sequence[int], servers: int) -> tuple[int, ...]:
    """Return the server of each parameter: whole ones, the largest first, to who has least.

    Raises:
        ConfigError: there are more servers than parameters, or none of the latter.

    Cost:
        ``O(n log n + n s)`` for ``n`` parameters and ``s`` servers.

    >>> place([400, 100, 250, 40], servers=2)
    (0, 1, 1, 1)
    """
    if not sizes_bytes:
        raise ConfigError(
            "the model has no parameters that are trained, so there is nothing for parameter "
            "servers to hold; leave requires_grad on for some, or do not watch it"
        )
    if not 1 <= servers <= len(sizes_bytes):
        raise ConfigError(
            f"{servers} parameter servers were asked for, and the model has {len(sizes_bytes)} "
            f"parameters that are trained, each held by one server; ask for 1 to "
            f"{len(sizes_bytes)} servers"
        )
    held_bytes, held = [0] * servers, [0] * servers
    places = [0] * len(sizes_bytes)
    for index in sorted(range(len(sizes_bytes)), key=lambda i: (-sizes_bytes[i], i)):
        # By number where bytes are equal, so that parameters without elements are dealt out, too.
        server = min(range(servers), key=lambda s: (held_bytes[s], held[s], s))
        places[index] = server
        held_bytes[server] += sizes_bytes[index]
        held[server] += 1
    return tuple(places)
