"""The layout of the source stays within its limits. `make house` prints the figures."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import PROMISED, QUICKLY_MEASURED, SLOW
from tests.house.sources import ROOT

# Each limit is the present figure. Lower a limit when its figure becomes lower.
MOST = {
    "most modules in a folder": 14,
    "class names used twice or more": 0,
    "module names used twice or more": 0,
    "largest fan-out": 15,
    "longest import chain": 12,
    "import circles": 0,
    "assignments to other objects' attributes": 0,
    "lines": 79_939,
}
LEAST = {"comments per 100 lines": 5.9}


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "tools" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


HOUSE = _tool()


def test_the_source_is_within_its_limits() -> None:
    figures = HOUSE.House().figures()

    over = {name: figures[name] for name, limit in MOST.items() if figures[name] > limit}
    under = {name: figures[name] for name, limit in LEAST.items() if figures[name] < limit}
    assert not over | under, "beyond the limits; see python tools/house.py --list"


def test_every_package_describes_its_contents() -> None:
    packages = sorted((ROOT / "src" / "evenstride").rglob("__init__.py"))

    docs = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in packages}
    assert not [str(path) for path, text in docs.items() if len(text) < 40]


def test_the_slow_tests_are_where_the_list_says() -> None:
    # A file that moves would silently return to `make test`.
    missing = [name for name in (*SLOW, *QUICKLY_MEASURED) if not (ROOT / "tests" / name).exists()]
    for name in PROMISED:
        path, _, test = name.partition("::")
        if f"def {test.partition('[')[0]}(" not in (ROOT / "tests" / path).read_text():
            missing.append(name)

    assert missing == []


def test_no_public_name_of_a_package_is_also_one_of_its_modules() -> None:
    # `from package import name` would return one or the other, depending on earlier imports.
    both = []
    for path in (ROOT / "src" / "evenstride").rglob("__init__.py"):
        inner = {one.stem for one in path.parent.iterdir()}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                both += [name for name in ast.literal_eval(node.value) if name in inner]
    assert both == []


def _source(folder: Path, files: dict[str, str]) -> Path:
    source = folder / "package"
    for name, text in files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return source


def test_names_used_twice_are_found_with_their_places(tmp_path: Path) -> None:
    source = _source(
        tmp_path,
        {
            "__init__.py": "",
            "a/__init__.py": "",
            "a/same.py": "class Twice: ...\nclass Once: ...",
            "b/__init__.py": "",
            "b/same.py": "def f():\n    class Twice: ...",
        },
    )

    house = HOUSE.House(source)

    assert house.repeated_classes() == {"Twice": ["package.a.same", "package.b.same"]}
    assert house.repeated_modules() == {"same": ["package.a.same", "package.b.same"]}
    assert house.folders() == {"package/a": 1, "package/b": 1}


def test_imports_are_counted_wherever_they_are(tmp_path: Path) -> None:
    source = _source(
        tmp_path,
        {
            "__init__.py": "",
            "one.py": "from package import two\nfrom package.three import x\nimport os",
            "two.py": "def f():\n    import package.three",
            "three.py": "if TYPE_CHECKING:\n    import package.two",
            "four.py": "from package.one import f",
        },
    )

    house = HOUSE.House(source)

    assert house.fan_out()["package.one"] == 2
    assert house.circles() == [["package.three", "package.two"]]
    assert house.longest_chain() == ["package.four", "package.one", "package.three|package.two"]


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("other.ours = 1", 1),
        ("other.inner.ours += 1", 1),
        ("self.ours = 1", 0),
        ("other.theirs = 1", 0),
        ("ctx.ours = 1", 0),
        ("new = C()\n        new.ours = 1", 0),
        ("other.x, other.ours = 1, 2", 1),
    ],
)
def test_assignments_to_other_objects_of_ours_are_found(
    tmp_path: Path, statement: str, found: int
) -> None:
    text = "class C:\n    ours: int\n\nclass D:\n    def f(self, other):\n        "
    house = HOUSE.House(_source(tmp_path, {"__init__.py": "", "one.py": text + statement}))

    assert len(house.foreign_assignments()) == found


def test_comments_count_but_directives_do_not(tmp_path: Path) -> None:
    text = "x = 1  # why\ny = 2  # noqa: E501\n# another\nz = '# no comment'\n"
    files = {"__init__.py": "", "core/__init__.py": "", "core/one.py": text, "lab/two.py": "# x"}
    house = HOUSE.House(_source(tmp_path, files))

    assert house.comments_per_100_lines() == pytest.approx(50.0)
