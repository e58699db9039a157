"""Messages of a rank that trains alone: to itself, in memory."""

from __future__ import annotations


class LocalChannel:
    """The part of `Channel` that exchanges need, for one process, which asks and answers itself."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        """Set a key; from any thread."""
        self._texts[key] = text

    def take(self, key: str) -> str:
        """Return the text of a key that is there."""
        return self._texts[key]

    def take_all(self, keys: list[str]) -> list[str]:
        """Return the texts of keys that are there."""
        return [self._texts[key] for key in keys]

    def present(self, keys: list[str]) -> list[bool]:
        """Return for each key whether it is there."""
        return [key in self._texts for key in keys]

    def drop(self, key: str) -> None:
        """Delete a key, if it is there."""
        self._texts.pop(key, None)

    def close(self) -> None:
        """Nothing to close."""
