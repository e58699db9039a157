"""A simulated cluster and its events, as described by a YAML file.

Start with `scenario_model`; `scenario_file` reads a file and reports errors in it.
"""
