"""Limits how often tests use private names of the project."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.sources import ROOT

# Places where a test reads or replaces a private name of ours. Lower it when there are fewer.
MOST_PLACES = 18
OURS = ("evenstride", "tests", "benchmarks", "examples")
# Private names of other libraries that have no public equivalent, and of dataclasses and tuples.
OTHERS = (
    *("torch", "dist", "os", "Variable", "compiled_autograd", "p", "mesh"),
    *("AcceleratorState", "FSDPState", "GradientState", "PartialState"),
    *("DistributedDataParallel", "_attention"),
)
PUBLIC = ("_asdict", "_replace", "_fields")
OF_FSDP = ("_get_fsdp_state", "_state_ctx", "_end_backward_iteration")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in (*PUBLIC, *OF_FSDP)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def reached(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a test imports, reads or replaces."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in OURS:
                yield from (name.name for name in node.names if _is_private(name.name))
            case ast.Attribute(attr=name) if _is_private(name):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if not own and _root(node) not in (*OTHERS, "super"):
                    yield name
            case ast.Call(
                func=ast.Attribute(attr="setattr"), args=[owner, ast.Constant(str(name)), *_]
            ):
                if _is_private(name) and _root(owner) not in OTHERS:
                    yield name
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(str(path)), *_]):
                if _is_private(path.rpartition(".")[2]):
                    yield path


def _places(path: Path) -> list[str]:
    return list(reached(ast.parse(path.read_text(), str(path))))


def test_tests_reach_no_more_private_names_than_they_did() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    places = {str(path.relative_to(ROOT)): found for path in files if (found := _places(path))}

    assert sum(map(len, places.values())) <= MOST_PLACES, places


def test_a_private_name_is_found_wherever_it_is_reached() -> None:
    code = """
from evenstride.core import _secret
stride._member.scaling
monkeypatch.setattr(module, "_LIMIT", 3)
monkeypatch.setattr("evenstride.core._limit", 3)
self._own, torch._C, named._replace(a=1), other.__dict__
monkeypatch.setattr(os, "_exit", print)
"""

    assert sorted(reached(ast.parse(code))) == [
        "_LIMIT",
        "_member",
        "_secret",
        "evenstride.core._limit",
    ]
