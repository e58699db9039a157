"""The fenced blocks of the pages and the commands of their sentences, as a reader copies them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Other pages for readers. The change log is history: it may name what was removed since.
OTHERS = [ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")]
OTHERS += sorted((ROOT / "examples").rglob("*.md"))
PROGRAMS = ("evenstride", "make", "pip", "python", "torchrun", "torchft_lighthouse")
_COMMAND = rf"(?:\w+=\S* )*(?:{'|'.join(PROGRAMS)})\s"
_INLINE = re.compile(rf"`({_COMMAND}[^`]+)`")
_FENCE = re.compile(r"^```([a-z]*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Args:
        page: its file's name without the ending.
        line: in that file, from 1, of the opening fence.
        language: after the fence; empty if none is named.
        text: what stands between the fences.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """For messages and for the names of tests: page and first line that is not empty."""
        lines = (line for line in self.text.splitlines() if line.strip())
        return f"{self.page}: {next(lines, '')}"


def blocks_of(path: Path) -> Iterator[Block]:
    """Yield a page's fenced blocks in order."""
    text = path.read_text()
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(path.stem, line, found[1], found[3])


def blocks(language: str) -> list[Block]:
    """Return the blocks of all pages that are in a language."""
    return [one for page in PAGES for one in blocks_of(page) if one.language == language]


def commands(block: Block) -> list[str]:
    """Return the commands of a shell block, without comments and with lines joined at a ``\\``."""
    whole = block.text.replace("\\\n", " ")
    bare = (re.sub(r"(^|\s+)#.*$", "", line).strip() for line in whole.splitlines())
    return [re.sub(r"\s+", " ", line) for line in bare if line]


def printed(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each command with arguments, in sentences, tables and blocks."""
    text = path.read_text()
    for one in blocks_of(path):
        # Usage, as in `evenstride plan [OPTIONS] RUNS...`, is no command.
        if one.language in ("", "sh", "text") and "[OPTIONS]" not in one.text:
            found = (line for line in commands(one) if re.match(_COMMAND + "(?!\\d)", line))
            yield from ((one.line, line) for line in found)
    prose = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for inline in _INLINE.finditer(prose):
        yield prose.count("\n", 0, inline.start()) + 1, re.sub(r"\s+", " ", inline[1])


def shown() -> dict[Block, str]:
    """Return what the pages show as the output of a block: the block of text right after it."""
    pairs = (pair for page in PAGES for pair in itertools.pairwise(blocks_of(page)))
    return {one: after.text for one, after in pairs if after.language == "text"}
