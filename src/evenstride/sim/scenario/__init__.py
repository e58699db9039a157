"""A simulated cluster and what befalls it, as a YAML file describes it.

Start with `scenario_model`; `scenario_file` reads one and names what is wrong with it.
"""
