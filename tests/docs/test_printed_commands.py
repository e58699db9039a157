"""Each program accepts the commands that pages print; what a reader can run is in the table."""

from __future__ import annotations

import pytest

from tests.docs.accepted import is_whole
from tests.docs.blocks import OTHERS, PAGES, ROOT, blocks_of, commands, printed
from tests.docs.table import KNOWN
from tests.docs.tutorial import PAGES as TUTORIAL

PRINTED = {
    f"{page.relative_to(ROOT)}:{line}: {command}": command
    for page in [*PAGES, *OTHERS]
    for line, command in printed(page)
}
FOLLOWED = [
    one
    for page in TUTORIAL
    for block in blocks_of(page)
    if block.language == "sh"
    for one in commands(block)
]
RECORDS = "docs/records/"  # what was done, once


@pytest.mark.parametrize("where", PRINTED, ids=list(PRINTED))
def test_its_program_accepts_a_command_that_is_run_if_it_is_whole(where: str) -> None:
    whole = is_whole(PRINTED[where])

    known = where.startswith(RECORDS) or PRINTED[where] in [*KNOWN, *FOLLOWED]
    assert known or not whole, "give it a line in table.py"


@pytest.mark.parametrize(
    "command",
    [
        "evenstride plan --onlin",
        "evenstride simulate h6 -p unifrm",
        "evenstride lab --speds 1,1 -- train.py",
        "evenstride lab --speeds 1,1 -- examples/none.py",
        "make tst",
        "pip install '.[plan,repot]'",
        "python benchmarks/gpu.py --device tpu",
        "python -m examples.ions.none FOLDER",
        "torchrun --nproc-per-node 2 examples/ddp.py --sample 3",
        "torchrun --nproc-per-node 2 -m evenstride doctor --bnch",
    ],
)
def test_a_wrong_command_is_refused(command: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        is_whole(command)


@pytest.mark.parametrize("command", ["evenstride plan --online", "evenstride trace --with"])
def test_a_fragment_is_not_whole(command: str) -> None:
    assert not is_whole(command)
