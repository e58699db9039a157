"""Write the generated parts of the pages in docs/reference: commands, options and metrics.

Examples:
    python tools/reference_pages.py           write the pages
    python tools/reference_pages.py --check   list the pages that would change; exit code 1 if any

A generated part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``, where NAME is a
key of `PARTS`. The rest of a page is written by hand.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

import evenstride
from evenstride.cli.main import COMMANDS, app
from evenstride.runtime.sinks.snapshot import METRICS, PREFIX

ROOT = Path(__file__).parents[1]
_PART = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def cell(text: object) -> str:
    """Return a text as the cell of a table."""
    return " ".join(str(text).split()).replace("|", r"\|")


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> list[str]:
    """Return the lines of a table."""
    lines = [head, ("---",) * len(head), *rows]
    return [f"| {' | '.join(map(cell, line))} |" for line in lines]


def commands() -> Iterator[str]:
    """Yield a section for each command."""
    group: Any = get_command(app)
    for name in COMMANDS:
        yield from section(name, group.commands[name])


def section(name: str, command: Any) -> Iterator[str]:
    """Yield the lines of a command: summary, usage, arguments, options, examples."""
    text, _, examples = inspect.cleandoc(command.help).partition("Examples:")
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one not in arguments and not one.hidden]
    usage = " ".join(["evenstride", name, "[OPTIONS]", *map(placeholder, arguments)])
    yield from (f"## {name}", "", text.strip(), "", "```text", usage, "```", "")
    if arguments:
        rows = [(f"`{cell(placeholder(one))}`", one.help) for one in arguments]
        yield from (*table(("argument", "meaning"), rows), "")
    yield from table(("option", "default", "meaning"), map(option_row, options))
    yield ""
    if lines := [line.strip() for line in examples.splitlines() if line.strip()]:
        yield from ("Examples:", "", "```text", *lines, "```", "")


def placeholder(argument: Any) -> str:
    """Return what stands for an argument in the usage."""
    name = argument.metavar or argument.name.upper()
    name = name if argument.required or name.startswith("[") else f"[{name}]"
    return name + "..." * (argument.nargs != 1 and not name.endswith("...]"))


def option_row(option: Any) -> tuple[object, ...]:
    """Return a row: the names of an option, its default, and its meaning with the allowed range."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = f" `{cell(option.metavar)}`" if option.metavar else ""
    default = option.default
    if isinstance(default, bool) and option.secondary_opts:
        default = (option.opts if default else option.secondary_opts)[0]
    known = not isinstance(default, bool) and default not in (None, "", [])
    if option.min is None:
        limits = ""
    elif option.max is None:
        limits = f" At least {option.min}."
    else:
        limits = f" From {option.min} to {option.max}."
    return names + value, f"`{default}`" if known else "", f"{option.help}{limits}"


def arguments_of(function: Callable[..., object]) -> list[str]:
    """Return a table of a function's arguments, from its signature and its docstring."""
    signature = inspect.signature(function)
    rows: list[tuple[object, ...]] = []
    for name, meaning in described(function):
        default = signature.parameters[name.lstrip("*")].default
        shown = "" if default is inspect.Parameter.empty else f"`{default!r}`"
        rows.append((f"`{name}`", shown, meaning))
    return table(("argument", "default", "meaning"), rows)


def described(function: Callable[..., object]) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a docstring with their meanings."""
    _, _, after = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    block = re.split(r"\n(?=\S)", after)[0]
    for one in re.split(r"\n(?=    \S)", "\n" + block)[1:]:
        name, _, meaning = one.strip().partition(":")
        yield name, meaning.replace("``", "`")


def metrics() -> list[str]:
    """Return the table of metrics."""
    rows: list[tuple[object, ...]] = []
    for one in METRICS:
        kind, label = "counter" if one.counts else "gauge", f"`{one.label}`" if one.label else ""
        rows.append((f"`{PREFIX}{one.name}`", kind, label, one.unit, one.means))
    return table(("name", "type", "label", "unit", "what it is"), rows)


PARTS: dict[str, Callable[[], Iterable[str]]] = {
    "commands": commands,
    "stride": lambda: arguments_of(evenstride.Stride),
    "loader": lambda: arguments_of(evenstride.Stride.loader),
    "watch": lambda: arguments_of(evenstride.Stride.watch),
    "checkpointer": lambda: arguments_of(evenstride.Checkpointer),
    "metrics": metrics,
}


def changed_pages() -> dict[Path, str]:
    """Return the text of each page with a part that differs from the code."""
    found = {}
    for path in sorted((ROOT / "docs" / "reference").glob("*.md")):
        text = path.read_text("utf-8")
        new = _PART.sub(
            lambda part: part[1] + "\n" + "\n".join(PARTS[part[2]]()).strip() + "\n\n" + part[3],
            text,
        )
        if new != text:
            found[path] = new
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the generated parts of the reference.")
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    pages = changed_pages()
    for page, contents in pages.items():
        print(f"{'differs' if check else 'written'}: {page.relative_to(ROOT)}")
        if not check:
            page.write_text(contents, "utf-8")
    raise SystemExit(bool(check and pages))
