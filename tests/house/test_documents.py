"""Checks of the documents: links, code blocks, make targets and names of modules."""

from __future__ import annotations

import ast
import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.md")]
)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")
_PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
_SOURCE = ROOT / "src" / "evenstride"
_PACKAGES = "|".join(path.name for path in sorted(_SOURCE.iterdir()) if path.is_dir())
_DOTTED = re.compile(rf"`(?:evenstride\.)?((?:{_PACKAGES})(?:\.(?!html)\w+)+)")
_PATH = re.compile(rf"`((?:{_PACKAGES})(?:/\w+)+\.py)`")
_COMMAND = re.compile(r"(?:^|`)make ([a-z-]+)", re.MULTILINE)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", path.read_text(), re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {"#" + slug.strip().replace(" ", "-") for slug in slugs}


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_link_into_the_project_leads_somewhere(path: Path) -> None:
    for target, anchor in _LINK.findall(path.read_text()):
        page = (path.parent / target).resolve() if target else path

        assert page.exists(), f"{path.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(page), f"{path.name}: {target} has no heading {anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_python_snippet_is_python(path: Path) -> None:
    for snippet in _PYTHON.findall(path.read_text()):
        if ">>>" not in snippet:
            ast.parse(snippet)


def test_the_bounds_of_the_papers_claims_are_computed() -> None:
    outcome = doctest.testfile(str(ROOT / "docs" / "records" / "claims.md"), module_relative=False)

    assert outcome.attempted > 10
    assert outcome.failed == 0


CLAIM = re.compile(r"^\| ([A-Z]{2}\d+) \|(.*)\|$", re.MULTILINE)


def test_claims_keep_what_ran_on_other_machines_out_of_what_ran_as_claimed() -> None:
    rows = CLAIM.findall((ROOT / "docs" / "records" / "claims.md").read_text())
    names = {name for name, _ in rows}

    assert len(names) == len(rows) > 100
    for name, row in rows:
        _, claimed, bound, simulated, real, elsewhere, _ = map(str.strip, row.split("|"))
        assert claimed and bound and simulated, name
        assert real.startswith(("not run, needs ", "nothing to run: ")), name
        assert not re.search(r"two cores|\b[Oo]wn jobs", simulated + real), name
        reference = re.match(r"As ([A-Z]{2}\d+)", elsewhere)
        known = reference is not None and reference[1] in names
        reason = elsewhere.startswith(("none: ", "none yet: `python benchmarks/papers/"))
        assert reason or known or re.search(r"\(\[\w+\]\(\w+\.md\)\)$", elsewhere), name


# Their speeds are assumed: in proportion to cores or FLOP/s of the paper, or invented.
_ASSUMED = re.compile(
    r"\[[^]]*\b(h2|h6|h10|p100-xeon|t4-p4-\d+|lb-bsp-cpu-mix|dbs-disturbance|omnilearn-schedule)\b"
)


def test_claims_whose_simulation_repeats_an_assumption_say_so() -> None:
    rows = CLAIM.findall((ROOT / "docs" / "records" / "claims.md").read_text())
    # These count changes of the split, and claim no time.
    timed = [(name, row.split("|")) for name, row in rows if name not in ("DB36", "DB41")]
    assumed = {name: cells[-1] for name, cells in timed if _ASSUMED.search(cells[3])}

    assert len(assumed) > 40
    assert [name for name, notes in assumed.items() if "Not comparable: " not in notes] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_make_target_named_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named_targets = set(_COMMAND.findall("\n".join(re.findall(r"`[^`]+`", path.read_text()))))

    assert named_targets <= targets


def exists(dotted: str) -> bool:
    """Return whether a name such as ``core.fleet.Worker`` is a module or a name in a module."""
    place, parts = _SOURCE, dotted.split(".")
    for number, part in enumerate(parts):
        if (place / part).is_dir():
            place /= part
            continue
        if (module := place / f"{part}.py").exists():
            inside = parts[number + 1 : number + 2]
        else:
            module, inside = place / "__init__.py", [part]
        text = module.read_text()
        return all(re.search(rf"\b{name}\b", text) for name in inside)
    return True


def test_every_module_that_a_text_names_exists() -> None:
    missing = []
    for path in [*DOCUMENTS, *_SOURCE.rglob("*.py")]:
        if path.name in ("CHANGELOG.md", "log.md"):
            continue  # these keep the names of their time
        text = path.read_text()
        absent = [name for name in _DOTTED.findall(text) if not exists(name)]
        absent += [name for name in _PATH.findall(text) if not (_SOURCE / name).exists()]
        missing += [f"{named(path)}: {name}" for name in absent]

    assert missing == []


def test_a_name_that_does_not_exist_is_found() -> None:
    assert exists("core.fleet.Worker")
    assert exists("core.policies.policy_from_spec")
    assert not exists("core.fleet.Nothing")
    assert not exists("core.nowhere")
