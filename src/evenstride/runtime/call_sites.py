"""Lines of the user's script, looked up on the stack when a warning names one."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_LIBRARIES = (*_OURS, *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")))


def user_line() -> str:
    """Return file and line of the innermost call from outside of libraries."""
    frames = list(_frames())
    frame = next((one for one in frames if not _of_library(one)), frames[0] if frames else None)
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_with(*patterns: str) -> str:
    """Return the first line of the calling function that has one of some patterns, in their order.

    The line of the call itself if there is none, or the source is not there.
    """
    frame = next((one for one in _frames() if not _of_library(one)), None)
    if frame is None:
        return user_line()
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
    except (OSError, TypeError):
        return user_line()
    first = max(first, 1)  # of a module it is 0
    for pattern in patterns:
        for number, line in enumerate(lines, first):
            if re.search(pattern, line.partition("#")[0]):
                return f"{frame.f_code.co_filename}:{number}"
    return user_line()


def range_behind(epoch: int) -> tuple[str, str] | None:
    """Return line and text of the ``range`` that counts epochs, if it is behind the run's epoch.

    Only the innermost loop over a ``range`` around the training loop is looked at. ``None`` if
    there is none, its counter is not behind, or it takes `Stride.epoch` into account.

    Args:
        epoch: that the run is in.
    """
    for frame in _frames():
        hands_through = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
        if _of_library(frame):
            if not hands_through:  # a framework that counts epochs itself
                return None
            continue
        loop = _range_loop(frame)
        if loop is not None:
            counter = _value(frame, loop.target)
            behind = isinstance(counter, int) and counter < epoch
            if not behind or _knows_epoch(frame, loop.iter):
                return None
            return f"{frame.f_code.co_filename}:{loop.lineno}", ast.unparse(loop.iter)
        if hands_through:  # whoever draws from it may count something else
            return None
    return None


def _frames() -> Iterator[FrameType]:
    """Yield the frames that are neither ours nor torch's, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            yield frame
        frame = frame.f_back


def _of_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen"))


def _tree(frame: FrameType) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except (SyntaxError, ValueError):
        return ast.parse("")


def _range_loop(frame: FrameType) -> ast.For | None:
    """Return the innermost loop over a ``range`` that a frame is in."""
    within = [
        node
        for node in ast.walk(_tree(frame))
        if isinstance(node, ast.For)
        and node.body[0].lineno <= frame.f_lineno <= (node.end_lineno or 0)
        and any(
            isinstance(part, ast.Call) and ast.unparse(part.func) in ("range", "trange")
            for part in ast.walk(node.iter)
        )
        and _same_function(frame, node)
    ]
    return max(within, key=lambda node: node.lineno, default=None)


def _same_function(frame: FrameType, node: ast.For) -> bool:
    return node.lineno >= frame.f_code.co_firstlineno


def _value(frame: FrameType, target: ast.expr) -> object:
    return frame.f_locals.get(target.id) if isinstance(target, ast.Name) else None


def _knows_epoch(frame: FrameType, expression: ast.expr) -> bool:
    """Return whether an expression has ``stride.epoch`` in it, or a name that was made from it."""
    if _has_epoch(expression):
        return True
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    made = [node for node in ast.walk(_tree(frame)) if isinstance(node, ast.Assign)]
    return any(
        isinstance(target, ast.Name) and target.id in names and _has_epoch(node.value)
        for node in made
        for target in node.targets
    )


def _has_epoch(expression: ast.expr) -> bool:
    return "stride.epoch" in ast.unparse(expression)
