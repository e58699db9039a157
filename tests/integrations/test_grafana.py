"""The dashboard for Grafana: its queries on a real Prometheus, its JSON by Grafana's own models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from evenstride.runtime.sinks.grafana_dashboard import dashboard
from tests.ending import TORCHRUN_S, end
from tests.free_ports import free_ports

ROOT = Path(__file__).parents[2]
DEADLINE_S = 100.0


def as_json() -> Any:
    """Return the dashboard as Grafana reads it."""
    return json.loads(json.dumps(dashboard()))


def queries() -> list[str]:
    return [target["expr"] for panel in as_json()["panels"] for target in panel["targets"]]


class Server:
    """A Prometheus server that scrapes one run every second."""

    def __init__(self, folder: Path, run: str) -> None:
        self.address, self.run = f"127.0.0.1:{free_ports(1)[0]}", run
        job = {"job_name": "evenstride", "static_configs": [{"targets": [run]}]}
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={self.address}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def get(self, path: str, **arguments: str) -> Any:
        """Return the data of an answer; ``None`` before the server listens."""
        try:
            with urlopen(f"http://{self.address}/api/v1/{path}?{urlencode(arguments)}") as answer:
                return json.load(answer)["data"]
        except URLError:
            return None

    def found(self, query: str) -> list[Any]:
        """Return the samples that a query of the dashboard finds for the run."""
        found = self.get("query", query=query.replace("$run", self.run))
        return [] if found is None else list(found["result"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Run Prometheus and a training run of two ranks until the end of the test."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    pytest.importorskip("prometheus_client", reason="needs the extra prometheus")
    run, stop = f"127.0.0.1:{free_ports(1)[0]}", tmp_path / "stop"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    script = Path(__file__).with_name("tracked_script.py")
    training = subprocess.Popen(
        [sys.executable, *torchrun, "--nproc-per-node=2", str(script), "until", str(stop)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "EVENSTRIDE_SINKS": f"prometheus:{run}",
            "EVENSTRIDE_NOISE": "1",
        },
        start_new_session=True,
    )
    prometheus = Server(tmp_path, run)
    try:
        yield prometheus
    finally:
        stop.touch()
        end(prometheus.process, 20.0)
        with suppress(subprocess.TimeoutExpired):
            training.wait(TORCHRUN_S)
        end(training, TORCHRUN_S)


def test_every_query_of_the_dashboard_finds_data_in_a_real_prometheus(server: Server) -> None:
    empty, until_s = queries(), time.monotonic() + DEADLINE_S
    while empty and time.monotonic() < until_s:
        empty = [query for query in empty if not server.found(query)]

    assert not empty
    runs = server.get("label/instance/values", **{"match[]": "evenstride_step"})
    assert runs == [server.run], "the variable of the dashboard has this run"
    shares = server.found('evenstride_worker_share_samples{instance="$run"}')
    assert sum(float(one["value"][1]) for one in shares) == 12
    assert len({one["metric"]["worker"] for one in shares}) == 2
    assert not server.found('evenstride_worker_share{instance="$run"}'), "a name that is wrong"


def _lost(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of what a model does not know."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            yield from (
                _lost(value, kept[key], f"{path}/{key}") if key in kept else [f"{path}/{key}"]
            )
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for place, pair in enumerate(zip(given, kept, strict=True)):
            yield from _lost(*pair, f"{path}/{place}")
    elif given != kept:
        yield path


def unknown_to_grafana(given: Any) -> list[str]:
    """Return the fields of a dashboard that Grafana's models lose, options of panels included."""
    pytest.importorskip("grafana_foundation_sdk", reason="Grafana's models are not installed")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    kept = json.loads(json.dumps(Dashboard.from_json(given).to_json(), cls=JSONEncoder))
    return list(_lost(given, kept))


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    assert unknown_to_grafana(as_json()) == []


WRONG: dict[str, Callable[[Any], Any]] = {
    "/panels/0/gridpos": lambda given: given["panels"][0].update(gridpos=1),
    "/panels/0/targets/0/query": lambda given: given["panels"][0]["targets"][0].update(query="x"),
    "/panels/0/options/calcs": lambda given: given["panels"][0]["options"].update(calcs=[]),
    "/templating/list/0/default": lambda given: given["templating"]["list"][0].update(default="x"),
}


@pytest.mark.parametrize("path", WRONG)
def test_a_field_that_grafana_does_not_know_is_found(path: str) -> None:
    wrong = deepcopy(as_json())
    WRONG[path](wrong)

    assert unknown_to_grafana(wrong) == [path]
