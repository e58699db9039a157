"""The report of one or several runs: a page that needs nothing else, and its charts for papers.

Start with `html_page`.
"""
