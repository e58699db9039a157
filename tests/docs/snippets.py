"""Runs a page's Python on a rank, with the names that the page takes for granted."""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, random_split

import evenstride
from evenstride.core.convergence.batch_efficiency import square_root
from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.core.reliability.lifetimes import Exponential

Names = dict[str, Any]
LENGTH, WIDTH, CLASSES = 1024, 6, 3


class Texts(Dataset[tuple[torch.Tensor, int]]):
    """Rows with a class, and texts of unequal length."""

    def __init__(self, length: int) -> None:
        self.texts = ["word" * (1 + index % 7) for index in range(length)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = torch.zeros(WIDTH)
        row[index % CLASSES] = 1.0
        return row, index % CLASSES


def pad(rows: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """Collate as the page on token weights has it."""
    return {
        "x": torch.stack([row for row, _ in rows]),
        "labels": torch.tensor([label for _, label in rows]),
    }


def count(path: Path) -> int:
    """Return the lines of a file."""
    return len(path.read_text().splitlines())


def _files(folder: Path) -> list[Path]:
    files = [folder / f"part-{number}.jsonl" for number in range(3)]
    for file in files:
        file.write_text("\n".join(json.dumps([number, 1.0]) for number in range(40)))
    return files


_MODULES: Names = {
    "torch": torch,
    "nn": nn,
    "F": F,
    "np": np,
    "os": os,
    "json": json,
    "itertools": itertools,
    "evenstride": evenstride,
    "DistributedDataParallel": DistributedDataParallel,
    "pad": pad,
    "count": count,
    "square_root": square_root,
    "random_split": random_split,
}
# What a page takes for granted, made when a snippet asks for it; from what is there already.
_GIVEN: dict[str, Callable[[Names], Any]] = {
    "dataset": lambda _: Texts(LENGTH),
    "data": lambda _: Texts(LENGTH),
    "val": lambda _: Texts(50),
    "epochs": lambda _: 2,
    "folder": lambda _: "saved",
    "path": lambda _: f"state-{dist.get_rank()}.pt",
    "files": lambda _: _files(Path(f"shards-{dist.get_rank()}")),
    "total": lambda _: 50,
    "correct": lambda _: 40,
    "right": lambda _: 40,
    "saving": lambda _: Saving(lifetime=Exponential(3600.0)),
    "evaluate": lambda names: lambda: names["stride"].mean(1.0, 1),
    "net": lambda _: nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES)),
    "stride": lambda _: evenstride.Stride(global_batch=512),
    "model": lambda names: names["stride"].watch(DistributedDataParallel(_of("net", names))),
    "optimizer": lambda names: torch.optim.SGD(_of("net", names).parameters(), lr=0.01),
    "loader": lambda names: names["stride"].loader(_of("dataset", names)),
}
_AFTER = {"model": ("stride", "net"), "loader": ("stride", "dataset"), "evaluate": ("stride",)}


def _of(name: str, names: Names) -> Any:
    """Return what is there by that name, made first if it is not."""
    if name not in names:
        for needed in _AFTER.get(name, ()):
            _of(needed, names)
        names[name] = _GIVEN[name](names)
    return names[name]


def taken_for_granted(text: str) -> list[str]:
    """Return the names that a snippet reads before it has set them, in order."""
    known, asked = set(dir(builtins)), dict[str, None]()
    for statement in ast.parse(text).body:
        nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        own = _own_names(statement)
        for node in nodes:
            if isinstance(node.ctx, ast.Load) and node.id not in known | own:
                asked[node.id] = None
        known |= own | {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    return list(asked)


def _own_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement brings itself: imports, arguments, what a loop sets."""
    found = set[str]()
    whole = not isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr)
    for node in ast.walk(statement):
        if whole and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.For | ast.comprehension):
            targets = ast.walk(node.target)
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def run_snippet(rank: int, folder: str, text: str, where: str) -> tuple[str, int]:
    """Run a snippet as one of the ranks, in a folder.

    Returns:
        What it printed, and the steps that it trained.
    """
    torch.manual_seed(0)
    before, printed = Path.cwd(), io.StringIO()
    os.chdir(folder)
    Path(f"shards-{rank}").mkdir(exist_ok=True)
    names: Names = dict(_MODULES)
    try:
        for name in taken_for_granted(text):
            if name not in names:
                _of(name, names)
        with contextlib.redirect_stdout(printed):
            exec(compile(text, where, "exec"), names)
        return printed.getvalue(), _finish(names, text)
    finally:
        os.chdir(before)


def _finish(names: Names, text: str) -> int:
    """End what the snippet began; a loader that it only makes yields a batch first."""
    if "loader" in names and "for " not in text:
        assert next(iter(names["loader"])) is not None
    if "checkpoint" in names:
        names["checkpoint"].close()
    stride = names.get("stride")
    if stride is None:
        return 0
    steps = int(stride.step)
    stride.close()
    return steps
