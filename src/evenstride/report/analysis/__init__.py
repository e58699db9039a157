"""What happened in a run, from its trace: whose times, which decisions, who waited for whom.

Start with `run_timeline`. `top`, the page and the export only draw what this package says.
"""
