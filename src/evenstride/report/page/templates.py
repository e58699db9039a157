"""HTML from the templates of this folder: whatever a template shows is escaped.

Names of hosts, files and metrics, reasons and facts are others' texts. Jinja escapes every
expression, and `shown` takes out of texts what a browser or a reader's eye would act on.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from evenstride.report.page.charts import svg
from evenstride.report.text_tables import shorten
from evenstride.report.wording import plain

_LONGEST = 400


def render(template: str, **values: Any) -> Markup:
    """Return a template of this folder, filled in with values; all of their texts are escaped."""
    return Markup(environment().get_template(template).render(values))


def asset(name: str) -> Markup:
    """Return a file of this folder as it is, such as the style sheet."""
    return Markup(files(__package__).joinpath(name).read_text(encoding="utf-8"))


@cache
def environment() -> Environment:
    """Return what makes the templates: it escapes, and refuses names that it was not given."""
    made = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.globals |= {"paths": svg.paths, "x_labels": svg.x_labels, "y_labels": svg.y_labels}
    made.globals["width"] = svg.WIDTH
    made.filters["shorten"] = shorten
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return made


def shown(value: object) -> object:
    """Return what stands for a value before it is escaped; `Markup` is HTML already."""
    if value is None:
        return ""
    if isinstance(value, float):
        return svg.number(value)
    return value if isinstance(value, Markup) else plain(value, _LONGEST)
