"""The report of one or several runs: a self-contained page, and its charts for papers.

Start with `html_page`.
"""
