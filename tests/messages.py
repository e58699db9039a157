"""Checks the texts that users read against one file: `tests/golden/messages.txt`.

A test passes the text of an error, a warning, a log or a command. The file holds the texts of each
test, in any order. So wording changes in one place: `make regen` writes the file again, and a
reviewer reads the difference. A test also names the facts that it is about: a number, a name, an
option. These must occur in the text, whatever the file holds.

The file names a test by its module and function, not by its folder, so that it does not change
when tests move. `tests/house/test_messages.py` fails if the file has texts of a removed test.
`make regen` and `python -m tests.messages` drop such texts.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import os
import re
import socket
import sys
import tempfile
import textwrap
from collections.abc import Generator, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Any, Generic, TypeVar, cast

import pytest

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "messages.txt"
HEAD = "# Written by `make regen`. These are the texts that users read: review the difference.\n"
WIDTH = 98
# Folders of tests that use real processes or measure real times.
MEASURING = (
    "tests/integrations",
    "tests/multiproc",
    "tests/live",
    "tests/faults",
    "tests/unit/lab",
    "tests/unit/benchmarks",
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")

_PYTEST = r"(?:-c|__main__\.py|py\.?test)"
_MODULE = re.compile(r"\bevenstride\.(?:[a-z_]+\.)+(?=[A-Z])")

E = TypeVar("E", bound=BaseException)
Texts = dict[str, list[str]]


def check_message(text: object, *facts: object, varies: Iterable[str] = ()) -> None:
    """Check that the golden file has this text for this test. Each text of the file matches once.

    Args:
        text: A string. A list or dict has one line per entry; any other object is its ``repr``.
        facts: Parts of the text that this test is about. Each must occur in it.
        varies: Patterns that differ from run to run, in addition to those of :func:`normalised`.
    """
    __tracebackhide__ = True
    plain = text if isinstance(text, str) else "\n".join(_lines(text))
    for fact in facts:
        assert str(fact) in plain
    if _texts is None:
        raise RuntimeError("check_message works only in the body of a test")
    _texts.check(normalised(plain, varies))


def raises_message(
    expected: type[E] | tuple[type[E], ...], *facts: object, varies: Iterable[str] = ()
) -> RaisesMessage[E]:
    """Expect an error, as ``pytest.raises`` does, and check its message and notes."""
    return RaisesMessage(expected, facts, varies)


def lines_with(text: str, *parts: str) -> str:
    """Return the lines of a text that contain at least one of the parts."""
    return "\n".join(line for line in text.splitlines() if any(part in line for part in parts))


class RaisesMessage(Generic[E]):
    """Context manager that expects an error and checks its message."""

    def __init__(
        self,
        expected: type[E] | tuple[type[E], ...],
        facts: tuple[object, ...],
        varies: Iterable[str],
    ) -> None:
        self._raises = pytest.raises(expected)
        self._facts, self._varies = facts, varies

    def __enter__(self) -> pytest.ExceptionInfo[E]:
        self._caught: pytest.ExceptionInfo[E] = self._raises.__enter__()
        return self._caught

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        __tracebackhide__ = True
        expected = self._raises.__exit__(kind, error, trace)
        if expected:
            notes = getattr(error, "__notes__", ())
            check_message("\n".join([str(error), *notes]), *self._facts, varies=self._varies)
        return expected


def normalised(text: str, varies: Iterable[str] = ()) -> str:
    """Replace the parts of a text that differ between runs or machines."""
    for varied in varies:
        text = re.sub(varied, "<varies>", text)
    for pattern, name in _PATTERNS:
        text = pattern.sub(name, text)
    return text


def _patterns() -> Iterator[tuple[str, str]]:
    temporary = re.escape(str(Path(tempfile.gettempdir()).resolve()))
    # Frames of a traceback, of our source and of other libraries.
    yield r"^ +File \"[^\"\n]*\", line \d+.*\n(?: {4,}.*\n)*", ""
    yield r"(?<![^\s'\"])[^\s'\"]*/site-packages\b", "<packages>"
    yield rf"{temporary}/pytest-of-[^/]+/pytest-\d+/(popen-gw\d+/)?\w+", "<tmp>"
    yield rf"{temporary}/(tmp|evenstride[\w-]*?)[\w.]{{6,}}", "<tmp>"
    yield re.escape(str(ROOT)), "<root>"
    yield re.escape(sys.prefix), "<python>"
    yield re.escape(sys.base_prefix), "<python>"
    yield rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w-])", "<host>"
    yield r"((?<![\w.])(?:\d{1,3}(?:\.\d{1,3}){3}|localhost|\[::1?\]):)\d{4,5}\b", r"\1<port>"
    yield r"(\bport |\bprometheus:|127\.0\.0\.1, )\d{4,5}\b", r"\1<port>"
    yield r"\b(pid|process) \d{2,}\b", r"\1 <pid>"
    yield r"\b0x[0-9a-f]{6,}\b", "<address>"
    yield r"(\bstep-\d{9}-)[0-9a-f]{12}\b|\b[0-9a-f]{32}\b", r"\1<id>"
    yield r"(\w)\1{99,}", r"\1\1\1<and so on>"
    yield r"\bevenstride-\d+-\d{8,}", "evenstride-<id>"
    yield r"\btorch " + re.escape(version("torch")), "torch <version>"
    yield r"\b" + re.escape(version("evenstride")) + r"(?![\w.])", "<version>"
    yield r"(errors\.pydantic\.dev)/[\d.]+/", r"\1/<version>/"
    # A parser in a test takes its program name from pytest's command line.
    yield rf"^usage: {_PYTEST} [\s\S]*?(?={_PYTEST}: error: )", ""
    yield rf"^{_PYTEST}(?=: error: )", "<command>"
    # This line is printed only on a busy machine, in addition to the text under test.
    yield r"^a checkpoint is due and the previous one is still being written.*\n(?=.)", ""
    # The module of a class inside our package; users import from one level only.
    yield _MODULE.pattern, ""
    yield r"\bPython {}\.{}(\.\d+)?".format(*sys.version_info), "Python <version>"


_PATTERNS = [(re.compile(pattern, re.MULTILINE), name) for pattern, name in _patterns()]


def shown(text: str) -> str:
    """Return a text as written in the file.

    It starts with "- ", each further line with "| ", and each continuation of a line with "  ".
    """
    lines: list[str] = []
    for line in text.rstrip().split("\n") or [""]:
        visible = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line.rstrip())
        parts = textwrap.wrap(
            visible, WIDTH, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
        )
        lines.append(f"{'|' if lines else '-'} {parts[0] if parts else ''}".rstrip())
        lines += [f"  {part}" for part in parts[1:]]
    return "\n".join(lines)


def _lines(texts: object) -> Iterator[str]:
    if isinstance(texts, dict):
        texts = [f"{key}: {value}" for key, value in texts.items()]
    if not isinstance(texts, list | tuple) or hasattr(texts, "_fields"):
        texts = [texts]
    yield from (one if isinstance(one, str) else repr(one) for one in texts)


_TEST = re.compile(r"test_\w+\.py::")


def key(nodeid: str) -> str:
    """Return the name of a test in the file: module file and function, without folders."""
    path, separator, name = nodeid.partition("::")
    return path.rpartition("/")[2] + separator + _MODULE.sub("", name)


def read() -> Texts:
    """Return the texts of each test in the file, in the form of :func:`shown`."""
    texts: Texts = {}
    test, cases, block = "", [""], list[str]()
    for line in GOLDEN.read_text("utf-8").splitlines() if GOLDEN.exists() else []:
        if _TEST.match(line):
            test, cases, block = line, [""], []
        elif line.startswith("["):
            if block or cases == [""]:
                cases, block = [], []
            cases.append(line)
        elif line.startswith("-"):
            block.append(line)
        elif line.startswith(("|", "  ")):
            block[-1] += f"\n{line}"
        if block:
            texts.update((test + case, block) for case in cases)
    return texts


def write(texts: Texts) -> None:
    """Write the file, sorted by test. Cases of a test with equal texts share one block."""
    tests: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for test in sorted(texts):
        name, bracket, case = test.partition("[")
        if texts[test]:
            tests.setdefault(name, {}).setdefault(tuple(texts[test]), []).append(bracket + case)
    blocks = [HEAD]
    for name, groups in tests.items():
        lines = [name]
        for block, cases in groups.items():
            lines += [*filter(None, cases), *block]
        blocks.append("\n".join([*lines, ""]))
    GOLDEN.write_text("\n".join(blocks), "utf-8")


def defined() -> dict[str, list[str]]:
    """Return the name of every test function in the file's form, with the paths that define it."""
    functions: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                functions.setdefault(f"{path.name}::{node.name}", []).append(str(path))
    return functions


def without_test(texts: Iterable[str], collected: Iterable[str] = ()) -> list[str]:
    """Return the tests that have texts in the file but no longer exist.

    Args:
        texts: Names of tests in the file.
        collected: Names of tests that pytest collected, with all their parameters. A test of one
            of these functions with other parameters no longer exists either.
    """
    collected = set(collected)
    whole, functions = {_function(test) for test in collected}, defined()
    return [
        test
        for test in texts
        if _without_class(_function(test)) not in functions
        or (_function(test) in whole and test not in collected)
    ]


def _function(test: str) -> str:
    return test.partition("[")[0]


def _without_class(test: str) -> str:
    parts = test.split("::")
    return f"{parts[0]}::{parts[-1]}"


class _TestTexts:
    """The texts that one test passes to `check_message`."""

    def __init__(self, item: pytest.Item, known: list[str], *, record: bool) -> None:
        self.item, self.known, self.record = item, known, record
        # With real processes a number may be measured, so it differs in each run.
        self.measures = item.path.is_relative_to(ROOT) and str(
            item.path.relative_to(ROOT)
        ).startswith(MEASURING)
        self.seen: list[str] = []
        self.left = list(known)  # in any order: threads of a test run in any order

    def check(self, text: str) -> None:
        __tracebackhide__ = True
        if getattr(getattr(self.item, "obj", None), "is_hypothesis_test", False):
            raise RuntimeError(
                "check_message does not support property tests, because their messages vary with "
                "the example; assert the facts of the message instead"
            )
        text = shown(_NUMBER.sub("#", text) if self.measures else text)
        self.seen.append(text)
        if text in self.left:
            self.left.remove(text)
        elif not self.record:
            expected = self.left[:1]
            self.refuse(difflib.ndiff("\n".join(expected).splitlines(), text.splitlines()))

    def finish(self) -> None:
        """Fail if the file has texts that this passed test did not check."""
        __tracebackhide__ = True
        if not self.record and self.left:
            self.refuse(f"- {line}" for line in "\n".join(self.left).split("\n"))

    def refuse(self, difference: Iterable[str]) -> None:
        __tracebackhide__ = True
        path = os.path.relpath(GOLDEN, ROOT)
        pytest.fail(
            f"text {len(self.seen)} of this test differs from {path} (-: in the file, +: now):\n"
            + "\n".join(line.rstrip() for line in difference)
            + f"\nTo accept it: make regen TESTS={self.item.nodeid.partition('::')[0]}",
            pytrace=False,
        )


def _checks(function: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Return whether a test checks a message, directly or in a function under tests/ it calls."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or function in seen:
        return False
    called = _names(function.__code__)
    if not called.isdisjoint({"check_message", "raises_message"}):
        return True
    others = (function.__globals__.get(name) for name in called)
    return any(
        _checks(other, seen | {function})
        for other in others
        if isinstance(other, FunctionType) and other.__module__.startswith("tests.")
    )


def _names(code: CodeType) -> set[str]:
    inner = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inner)


_texts: _TestTexts | None = None


class Golden:
    """The pytest plugin that reads the golden file and, on request, records it."""

    def __init__(self, *, record: bool) -> None:
        self.record = record
        self.known = read()
        self.seen: Texts = {}
        self.collected: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        # Before pytest deselects any: a deselected test keeps its texts. If the command line names
        # single tests, other cases of the same functions may exist as well.
        if not any("::" in argument for argument in config.args):
            self.collected.update(key(item.nodeid) for item in items)
        if self.record:
            others = [item for item in items if not self._concerns(item)]
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if self._concerns(item)]

    def _concerns(self, item: pytest.Item) -> bool:
        function = getattr(item, "function", None)
        return key(item.nodeid) in self.known or (function is not None and _checks(function))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        global _texts
        name = key(item.nodeid)
        _texts = _TestTexts(item, self.known.get(name, []), record=self.record)
        try:
            yield
            _texts.finish()
            if _texts.seen or name in self.known:
                self.seen[name] = _texts.seen
        finally:
            _texts = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = cast(dict[str, Any], getattr(node, "workeroutput", {}))
        self.seen.update(output.get("messages", {}))
        self.collected.update(output.get("collected", ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.record:
            return
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output.update(messages=self.seen, collected=list(self.collected))
            return
        texts = read() | self.seen
        gone = without_test(texts, self.collected)
        write({test: texts[test] for test in texts if test not in gone})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-messages",
        action="store_true",
        help="record the messages of the tests in tests/golden/messages.txt",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(
        Golden(record=config.getoption("--record-messages")), "golden messages"
    )


if __name__ == "__main__":
    known = read()
    gone = without_test(known)
    write({test: known[test] for test in known if test not in gone})
    print(f"dropped the texts of {len(gone)} removed test(s)")
