"""Follow a file of lines that another process is still writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class LineTail:
    """Hands out a growing file's complete lines, each once; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def records(self) -> list[dict[str, Any]]:
        """Return the JSON objects written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line]
