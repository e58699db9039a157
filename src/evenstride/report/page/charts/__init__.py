"""The charts of a report: each is described once, and drawn as SVG for the page and for papers.

Start with `chart`, the description. Modules named ``*_chart`` (and `closeup`) describe one chart
each; `svg` draws it for the page, and `paper_figures` by matplotlib.
"""
