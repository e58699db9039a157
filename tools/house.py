"""Print figures on the layout of the source: folders, names, imports, state, comments.

Examples:
    python tools/house.py                   print a table
    python tools/house.py --json            print the same figures as JSON
    python tools/house.py --list classes    print every name or place behind one figure

This tool sets no limits. tests/house/test_layout.py compares the figures with theirs.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "evenstride"
COMMENTED = ("core", "runtime")  # packages whose comments are counted
# Receivers that are objects of libraries, although a class of ours has an attribute of the same
# name: the context of an autograd function, a thread, a node of a YAML document.
OF_LIBRARIES = {"ctx", "self._thread", "node"}


@dataclass(frozen=True)
class Module:
    """A module of the source and its syntax tree."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


class House:
    """The modules of a package and the figures on them.

    Args:
        source: Folder of the package.
    """

    def __init__(self, source: Path = SOURCE) -> None:
        self.source = source
        self.modules = {module.name: module for module in _modules(source)}

    def folders(self) -> dict[str, int]:
        """Return the number of modules in each folder, without ``__init__``."""
        return Counter(
            str(module.path.parent.relative_to(self.source.parent))
            for module in self.modules.values()
            if not module.is_package
        )

    def repeated_classes(self) -> dict[str, list[str]]:
        """Return the class names that are defined more than once, with their modules."""
        places = defaultdict(list)
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(module.name)
        return _repeated(places)

    def repeated_modules(self) -> dict[str, list[str]]:
        """Return the module names that occur in several packages."""
        places = defaultdict(list)
        for name, module in self.modules.items():
            if not module.is_package:
                places[name.rpartition(".")[2]].append(name)
        return _repeated(places)

    def fan_out(self) -> dict[str, int]:
        """Return how many modules of the package each module imports, including for types."""
        return {name: len(targets) for name, targets in self.imports.items()}

    def longest_chain(self) -> list[str]:
        """Return the longest chain of imports. Modules in a circle count as one link."""
        circles = _circles(self.imports)
        circle_of = {name: circle for circle in circles for name in circle}
        longest: dict[frozenset[str], list[str]] = {}
        for circle in circles:  # imported modules come before those that import them
            below = {circle_of[target] for name in circle for target in self.imports[name]}
            tails = [longest[other] for other in below - {circle}]
            longest[circle] = ["|".join(sorted(circle)), *max(tails, key=len, default=[])]
        return max(longest.values(), key=len)

    def circles(self) -> list[list[str]]:
        """Return the groups of modules that import each other, including for types."""
        return [sorted(circle) for circle in _circles(self.imports) if len(circle) > 1]

    def foreign_assignments(self) -> list[str]:
        """Return the places where code sets an attribute of another object of the package.

        Only attributes that a class of the package declares or sets on itself count, not those of
        torch's or Python's objects. ``self``, ``cls`` and objects that the function made do not
        count.
        """
        ours = {name for module in self.modules.values() for name in _own_attributes(module.tree)}
        return [
            f"{module.path.relative_to(self.source.parent)}:{line} {what}"
            for module in self.modules.values()
            for line, what in _foreign_assignments(module.tree, ours)
        ]

    def comments_per_100_lines(self) -> float:
        """Return the comments per 100 lines in `COMMENTED`, without directives for tools."""
        lines = comments = 0
        for name, module in self.modules.items():
            if name.split(".")[1:2] and name.split(".")[1] in COMMENTED:
                lines += len(module.text.splitlines())
                comments += sum(1 for _ in _comments(module.text))
        return 100 * comments / lines

    def lines(self) -> int:
        """Return the number of lines in all modules."""
        return sum(len(module.text.splitlines()) for module in self.modules.values())

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The modules of the package that each module imports, anywhere in it."""
        return {
            name: {target for target in self._targets(module) if target != name}
            for name, module in self.modules.items()
        }

    def _targets(self, module: Module) -> Iterator[str]:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                yield from (one.name for one in node.names if one.name in self.modules)
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{one.name}" for one in node.names]
                found = [name for name in inner if name in self.modules]
                yield from found
                if len(found) < len(inner) and node.module in self.modules:
                    yield node.module

    def figures(self) -> dict[str, float]:
        """Return every figure by its name in the table."""
        folders, fans = self.folders(), self.fan_out()
        return {
            "modules": sum(not module.is_package for module in self.modules.values()),
            "lines": self.lines(),
            "most modules in a folder": max(folders.values()),
            "class names used twice or more": len(self.repeated_classes()),
            "module names used twice or more": len(self.repeated_modules()),
            "largest fan-out": max(fans.values()),
            "longest import chain": len(self.longest_chain()),
            "import circles": len(self.circles()),
            "assignments to other objects' attributes": len(self.foreign_assignments()),
            "comments per 100 lines": round(self.comments_per_100_lines(), 1),
        }

    def places(self) -> dict[str, list[str]]:
        """Return the names and places behind the figures, for ``--list``."""
        fans = sorted(self.fan_out().items(), key=lambda item: -item[1])
        folders = sorted(self.folders().items(), key=lambda item: -item[1])
        return {
            "folders": [f"{count:3} {name}" for name, count in folders],
            "classes": _lines_of(self.repeated_classes()),
            "modules": _lines_of(self.repeated_modules()),
            "fan-out": [f"{count:3} {name}" for name, count in fans],
            "chain": self.longest_chain(),
            "circles": [", ".join(circle) for circle in self.circles()],
            "assignments": self.foreign_assignments(),
        }


def _modules(source: Path) -> Iterator[Module]:
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        yield Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path)


def _repeated(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def _lines_of(repeated: dict[str, list[str]]) -> list[str]:
    return [f"{name}: {', '.join(found)}" for name, found in repeated.items()]


def _circles(graph: dict[str, set[str]]) -> list[frozenset[str]]:
    """Return the strongly connected components; imported ones precede those that import them.

    Source:
        Tarjan, "Depth-first search and linear graph algorithms", SIAM J. Comput. 1, 1972.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            cut = stack.index(name)
            found.append(frozenset(stack[cut:]))
            del stack[cut:]

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def _own_attributes(tree: ast.Module) -> Iterator[str]:
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        for node in ast.walk(owner):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield from [node.attr] if ast.unparse(node.value) == "self" else []


def _foreign_assignments(tree: ast.Module, ours: set[str]) -> Iterator[tuple[int, str]]:
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        made = {"self", "cls"} | OF_LIBRARIES | set(_made_here(function))
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                receiver = ast.unparse(node.value)
                if receiver not in made and node.attr in ours:
                    yield node.lineno, f"{receiver}.{node.attr}"


def _made_here(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the names that a function binds to results of calls, which are mostly new objects."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            yield from (one.id for one in node.targets if isinstance(one, ast.Name))


def _comments(text: str) -> Iterator[str]:
    directives = ("# type:", "# noqa", "# pragma", "# mypy", "#!")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(directives):
            yield token.string


def main(arguments: list[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--list", choices=sorted(House().places()), help="print the names behind one figure"
    )
    args = parser.parse_args(arguments)
    house = House()
    if args.list:
        found = house.places()[args.list]
        print(json.dumps(found, indent=2) if args.json else "\n".join(found))
    elif args.json:
        print(json.dumps(house.figures(), indent=2))
    else:
        for name, figure in house.figures().items():
            print(f"{name:42}{figure:>8,}")


if __name__ == "__main__":
    main(sys.argv[1:])
