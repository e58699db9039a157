"""``evenstride grafana``: write a dashboard for the metrics of the Prometheus sink."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from evenstride.cli.terminal_text import say
from evenstride.errors import ConfigError


def grafana(
    output: Annotated[
        Path, typer.Option("--output", "--out", "-o", help="The file to write.")
    ] = Path("grafana.json"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the dashboard instead of writing a file.")
    ] = False,
) -> None:
    """Write a Grafana dashboard with the figures of evenstride top.

    It shows the metrics that a Prometheus server collects from runs with the sink prometheus:PORT.
    In Grafana, import the file with Dashboards, New, Import.

    Examples:
        evenstride grafana -o grafana.json
    """
    from evenstride.runtime.sinks.grafana_dashboard import dashboard

    text = json.dumps(dashboard(), indent=2)
    if as_json:
        typer.echo(text)
        return
    try:
        output.write_text(text + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the dashboard to {output}: {error.strerror}; name another file with -o"
        ) from None
    say(f"{output} written; import it in Grafana with Dashboards, New, Import")
