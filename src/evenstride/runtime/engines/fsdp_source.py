"""Compares FSDP2's source with the places in which evenstride knows that it waits.

evenstride marks the waits of FSDP2 in private methods of torch. A release of torch that waits in
one more place would be timed wrongly, without any error. So `what_moved` reads the source and
lists, in every function:

- calls that make a stream wait, apart from the streams that only communicate;
- calls of ``wait`` and ``synchronize``, and collectives;
- calls of functions that wait but are not marked themselves;
- uses of marked methods that would pass by the marks.

`StallMarks` repeats some waits under the conditions under which torch makes them. A hash of these
conditions belongs to such a wait. Everything that is not in `_KNOWN` has moved.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

FOLDER = "torch/distributed/fsdp/_fully_shard"
NEWEST = "2.15"
"""The newest release of torch whose source is known."""

MARKED = ("unshard", "wait_for_unshard", "post_backward", "_wait_for_post_backward")
"""Methods of a parameter group whose calls `StallMarks` replaces."""
ENDS = "_end_backward_iteration"
"""The method of a root that waits for the reductions, from torch 2.15 on; marked as well."""
_HOOKED = (*MARKED, ENDS)

# Functions that wait but have no marks: they must not be called from anywhere else.
_UNMARKED = (
    "foreach_all_gather",
    "foreach_all_gather_copy_out",
    "foreach_reduce",
    "finalize_backward",
    "_finalize_backward",
    "all_gather_comm",
    "reduce_scatter_comm",
    "all_reduce_hook",
)
# Streams on which no work of the model runs.
_APART = (
    "all_gather_copy_in_stream",
    "all_gather_stream",
    "reduce_scatter_stream",
    "all_reduce_stream",
    "rs_stream",
)
_LIBRARIES = ("dist", "distributed", "distributed_c10d", "funcol", "_functional_collectives")
_COLLECTIVE = re.compile("all_|reduce|gather|scatter|broadcast|barrier|send|recv|isend|irecv")
_RUNS = re.compile(": runs |: calls .*_(comm|hook) ")
# Functions in which it counts under which conditions, and on which stream, torch waits.
_REPEATED = (
    "foreach_all_gather",
    "foreach_all_gather_copy_out",
    "foreach_reduce",
    "post_backward",
    "_wait_for_post_backward",
)

_GATHERS = ("DefaultAllGather", "ProcessGroupAllocAllGather", "SymmMemAllGather")
_SCATTERS = ("DefaultReduceScatter", "ProcessGroupAllocReduceScatter", "SymmMemReduceScatter")
_KNOWN = frozenset(
    {
        # Marked by `StallMarks`. Releases differ in the reductions that hold a buffer.
        "FSDPModule.unshard: waits for handle",
        "FSDPParamGroup.unshard: calls foreach_all_gather",
        "FSDPParamGroup.wait_for_unshard: calls foreach_all_gather_copy_out",
        "foreach_all_gather_copy_out: waits for all_gather_event [e3092c]",
        "foreach_all_gather_copy_out: waits for all_gather_work [c4e73f]",
        "FSDPParamGroup.post_backward: waits for self.comm_ctx.reduce_scatter_state.event [de2d8b]",
        "FSDPParamGroup.post_backward: waits for self.comm_ctx.reduce_scatter_state.event [6cc7f6]",
        "FSDPParamGroup.post_backward: waits for rs_state.event [605ed8]",
        "FSDPParamGroup.post_backward: waits for oldest.event [153234]",
        "FSDPParamGroup.post_backward: waits for oldest.event [80c4de]",
        "FSDPParamGroup._wait_for_post_backward: waits for self._post_reduce_event [cb8754]",
        "FSDPParamGroup._wait_for_post_backward: waits for self._all_reduce_state.event [c50e4d]",
        "FSDPParamGroup._wait_for_post_backward: waits for self._all_reduce_state.event [815a3c]",
        # The step is left out: only some of the modules sharded together ran, or an error.
        "FSDPParamGroup.post_backward: waits for self._post_reduce_event [dcc3b1]",
        "FSDPParamGroup._reset_iter_state: waits for event",
        "FSDPParamGroup._reset_iter_state: waits for work",
        "FSDPParamGroup._reset_iter_state: waits for self._post_reduce_event",
        "FSDPParamGroup._reset_iter_state: waits for self._all_reduce_state.event",
        "FSDPState._reset_iter_state: waits for event",
        "FSDPState._reset_iter_state: waits for ag_state.event",
        "FSDPState._reset_iter_state: waits for rs_state.event",
        # At the end of the backward pass, between the timer's own marks, or marked as `ENDS`.
        "FSDPState._root_post_backward_final_callback: calls _finalize_backward",
        "FSDPState._root_post_backward_final_callback: calls finalize_backward",
        "FSDPState._root_post_backward_final_callback: waits for rs_state.event",
        "FSDPState._root_post_backward_final_callback: "
        "waits for self._comm_ctx.reduce_scatter_state.event",
        "FSDPState._finalize_backward: calls finalize_backward",
        "FSDPState._end_backward_iteration: calls finalize_backward",
        "FSDPState._end_backward_iteration: waits for event",
        "FSDPState._end_backward_iteration: waits for rs_state.event",
        "FSDPModule.finalize_backward: calls finalize_backward",
        "FSDPParamGroup.finalize_backward: waits for event",
        "FSDPParamGroup.finalize_backward: waits for work",
        # Not for other ranks: copies of this rank, and tensor parallelism, which is refused.
        "FSDPParamGroup.finalize_backward: waits for fsdp_param.grad_offload_event",
        "FSDPCommContext.release_all_gather_state_on_current_stream: "
        "waits for all_gather_state.event",
        "FSDPParam._get_grad_inner_tensor: waits for grad",
        # On the streams of the communication. On a CPU, `subtract_collectives` counts them.
        *(f"{kind}.__call__: runs all_gather_into_tensor" for kind in _GATHERS),
        *(f"{kind}.__call__: runs all_gather_single" for kind in _GATHERS),
        *(f"{kind}.__call__: runs reduce_scatter_tensor" for kind in _SCATTERS),
        *(f"{kind}.__call__: runs reduce_scatter_single" for kind in _SCATTERS),
        "SymmMemAllocMixin.__init__: runs barrier",
        "foreach_all_gather: runs all_gather_into_tensor [630fa9]",
        "foreach_all_gather: calls all_gather_comm [630fa9]",
        "FSDPParamGroup.post_backward: calls foreach_reduce [e3b0c4]",
        "foreach_reduce: runs reduce_scatter_tensor [bea9fc]",
        "foreach_reduce: calls reduce_scatter_comm [bea9fc]",
        "foreach_reduce: calls reduce_scatter_comm [4486d8]",
        "foreach_reduce: runs all_reduce [e241cb]",
        "foreach_reduce: calls all_reduce_hook [a43577]",
    }
)
"""Every place of torch 2.6 to `NEWEST`, by what evenstride does about it."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "FSDPParamGroup": (
        *MARKED,
        "_all_gather_result",
        "_all_reduce_state",
        "_post_reduce_event",
        "_training_state",
        "comm_ctx",
        "device_handle",
        "is_unsharded",
        "modules",
        "reduce_grads",
    ),
    "FSDPCommContext": ("get_all_gather_streams",),
    "AllGatherResult": ("all_gather_event", "all_gather_work"),
    "AllReduceState": ("event",),
    "ReduceScatterState": ("event",),
    "TrainingState": ("FORWARD",),
}
# Names that evenstride reads, by class. Of these, one or the other:
_OLD_BUFFER = {"FSDPCommContext": ("reduce_scatter_state",)}
_NEW_BUFFERS = {
    "FSDPCommContext": ("reduce_scatter_states",),
    "FSDPParamGroup": ("_param_group_index", "_num_param_groups"),
}


@cache
def moved(*, collectives_only: bool = False) -> str:
    """Return what is unknown in the source of the installed torch; empty if nothing is.

    On a CPU only collectives matter. Takes about 0.1 s of one core, once in a process.
    """
    # Read from the files, because some methods in memory may be replaced already.
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parents[1] / FOLDER
    try:
        texts = {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.py"))}
    except OSError:
        texts = {}
    unknown = what_moved(texts)
    if collectives_only:
        unknown = [place for place in unknown if _RUNS.search(place)]
    return unknown[0] if unknown else ""


def what_moved(texts: Mapping[str, str]) -> list[str]:
    """Return what is unknown in FSDP2's files: names that are missing, then places that wait."""
    trees = {name: ast.parse(text) for name, text in texts.items()}
    return [*_missing(trees.values()), *_unknown(trees)]


def places(tree: ast.Module) -> list[tuple[str, int]]:
    """Return every place in a file that waits, and its line."""
    reader = _PlaceReader()
    reader.visit(tree)
    return reader.found


def _unknown(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    for name, tree in trees.items():
        for place, line in places(tree):
            if place not in _KNOWN:
                yield f"{place} (line {line} of {name})"


def _missing(trees: Iterable[ast.Module]) -> Iterator[str]:
    has: dict[str, set[str]] = {}
    for tree in trees:
        for part in tree.body:
            if isinstance(part, ast.ClassDef):
                has.setdefault(part.name, set()).update(_names_of(part))
    for owner, names in _NAMES.items():
        yield from (f"no {owner}.{name}" for name in names if name not in has.get(owner, ()))
    if not any(
        all(set(names) <= has.get(owner, set()) for owner, names in kind.items())
        for kind in (_OLD_BUFFER, _NEW_BUFFERS)
    ):
        yield "no FSDPCommContext.reduce_scatter_states"


def _names_of(owner: ast.ClassDef) -> Iterator[str]:
    """Yield the methods, fields and attributes that a class defines."""
    for part in ast.walk(owner):
        if isinstance(part, ast.FunctionDef):
            yield part.name
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.attr


class _PlaceReader(ast.NodeVisitor):
    """Collects the places of a file that wait."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []
        self._inside: list[str] = []
        self._conditions: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_inside(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_inside(node)

    # Which conditions hold for a wait is part of its place, so both branches record theirs.
    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self.visit(node.test)
        test = ast.unparse(node.test)
        self._visit_under(test, node.body)
        self._visit_under(f"not {test}", node.orelse)

    visit_While = visit_IfExp = visit_If  # noqa: N815

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._visit_under(ast.unparse(node.iter), [*node.body, *node.orelse])

    def visit_With(self, node: ast.With) -> None:
        # The stream on which torch waits is one of the conditions.
        calls = [ast.unparse(item.context_expr) for item in node.items]
        streams = [call for call in calls if ".stream(" in call]
        for item in node.items:
            self.visit(item)
        self._visit_under("\n".join(streams), node.body)

    def visit_Call(self, node: ast.Call) -> None:
        name, of = _callee(node.func)
        if name in ("wait_event", "wait_stream"):
            if of.rpartition(".")[2] not in _APART:
                self._add(node, f"waits for {', '.join(map(ast.unparse, node.args))}")
        elif name in ("wait", "synchronize"):
            self._add(node, f"waits for {of}")
        elif of.rpartition(".")[2] in _LIBRARIES and _COLLECTIVE.match(name):
            self._add(node, f"runs {name}")
        elif name in _UNMARKED:
            self._add(node, f"calls {name}")
        # A call of an object's method finds the mark. A call of the class's does not.
        if name not in _HOOKED or not of or of[0].isupper() or of.startswith("super("):
            self.visit(node.func)
        else:
            self.generic_visit(node.func)
        for part in (*node.args, *node.keywords):
            self.visit(part)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _HOOKED and isinstance(node.ctx, ast.Load):
            self._add(node, f"takes {node.attr}")
        self.generic_visit(node)

    def _visit_inside(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        # The conditions under which a function is defined do not matter for its body.
        conditions, self._conditions = self._conditions, []
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()
        self._conditions = conditions

    def _visit_under(self, condition: str, body: ast.expr | list[ast.stmt]) -> None:
        self._conditions += [condition] if condition else []
        for part in body if isinstance(body, list) else [body]:
            self.visit(part)
        if condition:
            self._conditions.pop()

    def _add(self, node: ast.expr, what: str) -> None:
        place = f"{'.'.join(self._inside)}: {what}"
        if self._inside and self._inside[-1] in _REPEATED:
            conditions = hashlib.sha256("\n".join(self._conditions).encode()).hexdigest()
            place += f" [{conditions[:6]}]"
        self.found.append((place, node.lineno))


def _callee(called: ast.expr) -> tuple[str, str]:
    """Return a called function's name and what it is an attribute of, as text."""
    if isinstance(called, ast.Attribute):
        return called.attr, ast.unparse(called.value)
    return (called.id, "") if isinstance(called, ast.Name) else ("", "")
