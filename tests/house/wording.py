"""Finds words outside the glossary and sentences that are too long, in documents and source.

Lists them for some files or folders: python -m tests.house.wording docs src/evenstride/core
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.house.sources import ROOT

# Words that the project once used for ideas that have a usual name, or that few readers know.
DIALECT = {
    r"told": "reported, printed, passed, known",
    r"tells? (?:all|each|every|the others)": "reports to, informs",
    r"nobody|no one": "no rank, no worker, or restate",
    r"everybody|everyone": "every rank, all workers",
    r"who(?:so)?ever": "any rank that, the rank that",
    r"whom": "restate; ranks and workers are things",
    r"befall\w*|befell": "happens to",
    r"anew": "again",
    r"seldom": "rarely",
    r"forgo(?:es|ing|ne)?|forwent": "give up, skip",
    r"dear|dearer|dearest": "expensive, costly",
    r"(?:there|that|which) (?:is|are) none": "does not exist, is missing, has no",
    r"(?:is|are|was|were) not there": "does not exist, is missing",
    r"those there are|what there is|what there are": "the available ones",
    r"of which there (?:is|are)": "restate",
    r"dealt|deals? out|dealing out": "split, distribute",
    r"besides? training": "asynchronously, during training",
    r"beside": "next to, in the same folder, during",
    r"calls? of all ranks": "collective call",
    r"keeps? (?:the )?others|kept (?:the )?others": "makes the others wait",
    r"taken for": "regarded as, declared",
    r"got over|get over|gets over": "recovered from",
    r"(?:is|are) said": "is printed, is reported",
    r"looks? at (?:runs?|it|them)|looked at (?:runs?|it|them)": "reads, watches",
    r"(?:has|have) left (?:a|the|its) loop": "stopped iterating early",
    r"bears? to|to be had|so many as": "restate",
    r"put off|puts off": "postpone",
    r"yardstick|diary|desk|farewell": "reference, log, ...",
    r"hearts?": "heartbeat",
    r"laggards?|latecomers?": "straggler",
}
_DIALECT = re.compile(rf"\b(?:{'|'.join(DIALECT)})\b", re.IGNORECASE)
# Parts of identifiers that say the same in code.
NAMES = {
    "told",
    "nobody",
    "whoever",
    "whom",
    "everybody",
    "anew",
    "befell",
    "dealt",
    "heart",
    "yardstick",
}
LONGEST = 40
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"'*_]*(?:\s+|$)|\n\s*\n")
_ABBREVIATIONS = re.compile(r"\b(?:e\.g|i\.e|cf|vs|Eq|Sec|Fig|et al|approx)\.")


@dataclass(frozen=True, slots=True)
class Prose:
    """A paragraph of a file, with the line on which it begins."""

    path: Path
    line: int
    text: str


def prose_of(path: Path) -> Iterator[Prose]:
    """Yield the paragraphs, docstrings, comments and messages of a Markdown or Python file."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        yield from _paragraphs(path, _without_code(text), 1)
    else:
        yield from _strings(path, ast.parse(text))
        yield from _comments(path, text)


def _without_code(text: str) -> str:
    """Blank out code, HTML comments, link targets and the words that a glossary rules out."""

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n") + " x " * ("\n" not in found[0])

    for pattern in (
        r"(?ms)^( *)```.*?^\1```",
        r"(?s)<!--.*?-->",
        r"(?s)\*Not\*:.*?(?:\n(?=[\n-])|\Z)",
    ):
        text = re.sub(pattern, blank, text)
    text = re.sub(r"`[^`]*`", blank, text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def _paragraphs(path: Path, text: str, line: int) -> Iterator[Prose]:
    """Split at blank lines, list items, table cells and headings."""
    begun, lines = line, list[str]()
    for number, one in enumerate([*text.split("\n"), ""], line):
        starts = re.match(
            r"\s*(?:[-*+>#|]|\d+\.|:::|>>>|\.\.\.|Args:|Returns:|Raises:|\*?\*?\w+:)", one
        )
        if (not one.strip() or starts) and lines:
            yield Prose(path, begun, "\n".join(lines))
            lines = []
        if one.lstrip().startswith("|"):
            yield from (Prose(path, number, cell) for cell in one.split("|") if cell.strip())
        elif one.strip() and not one.lstrip().startswith((">>>", "...")):
            begun = begun if lines else number
            lines.append(one)


def _strings(path: Path, tree: ast.AST) -> Iterator[Prose]:
    """Yield docstrings, and strings of several words; parts that are computed read as one word."""
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(p.value) if isinstance(p, ast.Constant) else "x" for p in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            text = node.value
        else:
            continue
        if len(text.split()) > 2:
            yield from _paragraphs(path, _without_doubled_code(text), node.lineno)


def _without_doubled_code(text: str) -> str:
    return re.sub(r":\w+:`[^`]*`|``[^`]*``|`[^`]*`", "x", text)


def _comments(path: Path, text: str) -> Iterator[Prose]:
    """Yield comments; those on successive lines are one."""
    begun, last, lines = 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or re.match(
            r"#\s*(?:type:|noqa|pragma|fmt:|!)", token.string
        ):
            continue
        row = token.start[0]
        if row != last + 1 and lines:
            yield Prose(path, begun, "\n".join(lines))
            lines = []
        begun = begun if lines else row
        lines.append(_without_doubled_code(token.string.lstrip("# ")))
        last = row
    if lines:
        yield Prose(path, begun, "\n".join(lines))


def dialect_in(prose: Prose) -> Iterator[str]:
    """Yield the words of a paragraph that the project does not use, with their place."""
    for found in _DIALECT.finditer(prose.text):
        line = prose.line + prose.text.count("\n", 0, found.start())
        yield f"{prose.path.relative_to(ROOT)}:{line}: {found[0]}"


def long_sentences_in(prose: Prose) -> Iterator[str]:
    """Yield the sentences of a paragraph that have more than 40 words, with their place."""
    text = _ABBREVIATIONS.sub(lambda found: found[0].replace(".", ""), prose.text)
    start = 0
    for end in [*(found.end() for found in _SENTENCE_END.finditer(text)), len(text)]:
        words = [word for word in text[start:end].split() if re.search(r"\w", word)]
        if len(words) > LONGEST:
            line = prose.line + text.count("\n", 0, start)
            opening = " ".join(words[:8])
            yield f"{prose.path.relative_to(ROOT)}:{line}: {len(words)} words: {opening} ..."
        start = end


def names_in(path: Path) -> Iterator[str]:
    """Yield the identifiers of a Python file that hold such a word, where they are defined."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                pass
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        if NAMES & set(re.findall(r"[a-z]+", re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {name}"


def files(places: list[Path]) -> list[Path]:
    """Return the Markdown and Python files among and below some paths."""
    found = [place.rglob("*") if place.is_dir() else [place] for place in places]
    return sorted({path for paths in found for path in paths if path.suffix in (".md", ".py")})


def problems(path: Path) -> list[str]:
    """Return what is wrong with the wording of a file, a line for each place."""
    paragraphs = list(prose_of(path))
    found = [line for one in paragraphs for line in (*dialect_in(one), *long_sentences_in(one))]
    return found + (list(names_in(path)) if path.suffix == ".py" else [])


if __name__ == "__main__":
    for file in files([Path(name).resolve() for name in sys.argv[1:]]):
        for problem in problems(file):
            print(problem)
