"""The charts of a report, as SVG for the page and as figures for papers.

Start with `chart_frame`. Modules named ``*_chart`` hold one chart each; `axes`, `palette` and `svg`
are what they draw with.
"""
