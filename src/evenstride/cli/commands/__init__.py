"""One module for each command of ``evenstride``, named after it. Start with the one you look for.

Each declares its options and calls the package that does the work. `cli.main` loads them by name.
"""
