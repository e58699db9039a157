"""Run a script as a worker that dies with its parent: ``-m evenstride.lab.elastic.plain SCRIPT``.

It takes as long to start as any process that imports torch.
"""

from __future__ import annotations

import sys

from evenstride.lab.elastic.zygote import run_script
from evenstride.lab.guarded import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    run_script(sys.argv[1:])
