"""``python -m evenstride``: the command line, as torchrun wants it for ``doctor``."""

from evenstride.cli.main import main

main()
