"""``python -m evenstride``: the command line, in the form that torchrun needs for ``doctor``."""

from evenstride.cli.main import main

main()
