"""The page for Prometheus: on loopback, during the run, and only with present workers."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import socket
import warnings
from collections.abc import Iterator
from dataclasses import replace
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from evenstride.runtime.sinks.snapshot import Sample, neutral
from tests.unit.runtime.sinks.made import HOSTILE, snapshot

pytest.importorskip("prometheus_client", reason="needs the extra prometheus")

from evenstride.runtime.sinks.prometheus_sink import PrometheusSink


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    """A sink on a free port, closed when the test ends."""
    opened = PrometheusSink("127.0.0.1", 0)
    yield opened
    opened.close()


def page(sink: PrometheusSink) -> str:
    with urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def values(sink: PrometheusSink) -> dict[tuple[str, ...], float]:
    """Return the numbers by name and label, as parsed by the library itself."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page(sink))
        for sample in family.samples
    }


def test_before_the_first_snapshot_the_page_is_empty(sink: PrometheusSink) -> None:
    assert values(sink) == {}


def test_the_latest_numbers_are_served(sink: PrometheusSink) -> None:
    sink.write(snapshot(40))
    sink.write(snapshot(50, busy_s=0.5))

    assert values(sink) == {
        ("evenstride_step",): 50.0,
        ("evenstride_epochs",): 1.5,
        ("evenstride_step_seconds",): 0.3,
        ("evenstride_changes_total",): 3.0,
        ("evenstride_worker_busy_seconds", "a"): 0.5,
        ("evenstride_worker_busy_seconds", "b"): 0.5,
        ("evenstride_metric", "loss"): 0.5,
    }
    assert "# TYPE evenstride_changes_total counter" in page(sink)
    assert "python_info" not in page(sink), "the registry is our own"


def test_workers_that_left_are_not_served(sink: PrometheusSink) -> None:
    sink.write(snapshot(workers="ab"))
    sink.write(snapshot(workers="b"))

    served = {key[1] for key in values(sink) if key[0] == "evenstride_worker_busy_seconds"}

    assert served == {"b"}


def test_a_hostile_name_is_one_label(sink: PrometheusSink) -> None:
    label = neutral(HOSTILE)
    sink.write(replace(snapshot(), samples=(Sample("worker_busy_seconds", label, 1.0),)))

    assert values(sink)["evenstride_worker_busy_seconds", label] == 1.0
    assert "\x1b" not in page(sink)


def test_other_addresses_do_not_reach_the_server(sink: PrometheusSink) -> None:
    with socket.socket() as asking, pytest.raises(OSError):  # noqa: PT012
        asking.settimeout(5)
        asking.bind(("127.0.0.1", 0))
        # Loopback has several addresses, and the server listens only on the requested one.
        asking.connect(("127.0.0.2", sink.port))


def test_a_forked_process_does_not_hold_the_port() -> None:
    sink = PrometheusSink("127.0.0.1", 0)
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads
        child.start()
    try:
        sink.close()

        with socket.create_server(("127.0.0.1", sink.port)):
            assert child.is_alive()
    finally:
        child.kill()
        child.join()


def test_the_port_is_logged_and_free_after_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="evenstride"):
        sink = PrometheusSink("127.0.0.1", 0)
    sink.close()

    assert f"http://127.0.0.1:{sink.port}/metrics" in caplog.text
    with pytest.raises(URLError):
        page(sink)
    with socket.create_server(("127.0.0.1", sink.port)):
        pass
