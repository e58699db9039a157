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


@pytest.mark.parametrize("where", PRINTED)
def test_its_program_accepts_a_command_that_is_run_if_it_is_whole(where: str) -> None:
    whole = is_whole(PRINTED[where])

    known = where.startswith(RECORDS) or PRINTED[where] in [*KNOWN, *FOLLOWED]
    assert known or not whole, "give it a line in table.py"
