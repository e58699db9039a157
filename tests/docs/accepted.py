"""Whether a program accepts a command that a page prints. No program is started."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from torch.distributed.run import get_args_parser
from typer.main import get_command

from evenstride.cli.arguments import read_modes, split_policies
from evenstride.cli.main import app
from evenstride.core.policies import policy_from_spec
from evenstride.core.spec import is_import_path, parse_spec
from tests.docs.blocks import ROOT

_PLACEHOLDER = re.compile(r"\.\.\.|<.*>|[A-Z]+")
_ANY = "1"  # stands for a placeholder, and is a number too
_READERS = ("train.py", "pkg.module")  # scripts of a reader


def is_whole(command: str) -> bool:
    """Return whether a reader can run a command as it is.

    A fragment lacks a script, a file or a value, or only names a script or an option. For ``make``
    and ``pip`` only targets and extras are checked.

    Raises:
        AssertionError: its program would refuse what is given.
        SystemExit: the same, after argparse printed why. Typer has errors of its own.
    """
    command = re.sub(r"^(\w+=\S* )+", "", command)
    words = shlex.split(re.sub(r"\s\[|\](?=\s|$)", " ", command))  # [--option VALUE]
    whole = not any(map(_PLACEHOLDER.fullmatch, words))
    given = [_ANY if _PLACEHOLDER.fullmatch(word) else word for word in words[1:] if word != "..."]
    for word in given:
        if re.match(r"(benchmarks|examples)/.*\.py$", word):
            assert (ROOT / word).exists(), f"{word} does not exist"
    return _CHECKS[words[0]](given) and whole


def _evenstride(words: list[str]) -> bool:
    group: Any = get_command(app)
    if words[0] == _ANY:
        return False
    command = group if words[0].startswith("-") else group.commands.get(words[0])
    assert command, f"evenstride has no command {words[0]}"
    arguments = words[command is not group :]
    try:
        # Otherwise an unknown option before a script would pass as one of the script.
        parsed = command.make_context(words[0], arguments, ignore_unknown_options=False)
    except typer.Exit:  # of --help and --version
        return True
    except Exception as error:
        if type(error).__name__ == "MissingParameter" or "requires an argument" in str(error):
            return False
        raise
    _check_values(parsed.params)
    return not all(word.startswith("-") for word in words[1:])


def _check_values(given: dict[str, Any]) -> None:
    """Parse policies and modes as the commands do; Typer knows them as text."""
    for policy in split_policies(given.get("policies") or ["uniform"]):
        if not is_import_path(parse_spec(policy).name):  # a reader's own; test_commands.py runs it
            policy_from_spec(policy)
    modes = given.get("sync") or "bsp"
    read_modes(modes if isinstance(modes, str) else ",".join(modes))


def _torchrun(words: list[str]) -> bool:
    parser = get_args_parser()
    parser.allow_abbrev = False
    asked = parser.parse_args([*words, "end"])  # where the script may be missing
    script = [asked.training_script, *asked.training_script_args][:-1]
    if script:
        _python(["-m", *script] if asked.module else script)
    return bool(script)


def _python(words: list[str]) -> bool:
    is_module = words[0] == "-m"
    name, *arguments = words[is_module:]
    if name == "evenstride":
        return _evenstride(arguments)
    if name not in _READERS:
        spec = find_spec(name) if is_module else None
        assert spec or not is_module, f"there is no module {name}"
        _parser(Path(str(spec.origin)) if spec else ROOT / name).parse_args(arguments)
    return bool(arguments)


def _parser(script: Path) -> argparse.ArgumentParser:
    """Return a parser with a script's options, read from its source; none is required."""
    parser = argparse.ArgumentParser(script.name, allow_abbrev=False, conflict_handler="resolve")
    for call in ast.walk(ast.parse(script.read_text())):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("parser.add_argument", "add"):
            names = [ast.literal_eval(one) for one in call.args]
            kept: dict[str, Any] = {} if names[0].startswith("-") else {"nargs": "?"}
            for keyword in call.keywords:
                if keyword.arg in ("action", "choices", "nargs"):
                    with suppress(ValueError):  # computed
                        kept[keyword.arg] = ast.literal_eval(keyword.value)
            parser.add_argument(*names, **kept)
    return parser


def _make(words: list[str]) -> bool:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        line = rf"^{name} \?=" if is_variable else rf"^{name}:"
        assert re.search(line, makefile, re.MULTILINE), f"the Makefile has no {name}"
    return False


def _pip(words: list[str]) -> bool:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:\s\.|evenstride)\[(.*?)\]", " ".join(words)):
        unknown = set(extras.split(",")) - set(project["optional-dependencies"])
        assert not unknown, f"evenstride has no extra {unknown}"
    return False


_CHECKS: dict[str, Callable[[list[str]], bool]] = {
    "evenstride": _evenstride,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "torchrun": _torchrun,
    "torchft_lighthouse": bool,  # not ours
}
