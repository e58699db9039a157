"""Valid and invalid settings of sinks."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from evenstride.errors import ConfigError
from evenstride.runtime.sinks.sink_settings import open_sinks, sinks_of
from tests.free_ports import free_ports
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride

REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "an unknown one": ("aim:x", ("'aim:x'", "FILE")),
    "a project with other characters": ("wandb:a#b", ("'wandb:a#b'", "PROJECT")),
    "a project in too many parts": ("wandb:a/b/c", ("'wandb:a/b/c'", "ENTITY")),
    "a project that is too long": ("wandb:" + 129 * "a", ("128",)),
    "one of another case": ("CSV:x", ("'CSV:x'",)),
    "no name": (":x", ("':x'",)),
    "no place": ("csv:", ("'csv:'",)),
    "no colon": ("tensorboard", ("'tensorboard'",)),
    "parentheses that stay open": ("csv(x", ("'csv(x'",)),
    "no port": ("prometheus:host", ("'prometheus:host'",)),
    "a port too large": ("prometheus:65536", ()),
    "a negative port": ("prometheus:-1", ()),
    "a port of other digits": ("prometheus:\u0661", ()),
    "an address without brackets": ("prometheus:::1:9108", ()),
    "a number": (9108, ("9108",)),
    "numbers": ([1, 2], ()),
    "one twice": ("csv:a,csv:a", ("'csv:a'",)),
    "a second that cannot be": ("csv:a,b", ("'b'",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_sink_is_refused(make_stride: MakeStride, name: str) -> None:
    asked, complaint = REFUSED[name]

    with raises_message(ConfigError, *complaint):
        make_stride(sinks=asked)


@pytest.mark.parametrize("asked", ["", [], (), " , "])
def test_sinks_may_be_none(asked: Any) -> None:
    assert sinks_of(asked) == ()


def test_several_sinks_may_be_one_text_or_a_list() -> None:
    two = ("csv:a", "prometheus:0")

    assert sinks_of("csv:a, prometheus:0") == sinks_of(list(two)) == two
    assert sinks_of(["csv:with,comma.csv"]) == ("csv:with,comma.csv",)


@pytest.mark.parametrize(
    "asked",
    ["wandb", "wandb:", "wandb:a b", "wandb:team/ours", "mlflow", "mlflow:sqlite:///m.db"],
)
def test_trackers_may_leave_the_place_to_the_environment(asked: str) -> None:
    assert sinks_of(asked) == (asked,)


@pytest.mark.parametrize("kind", ["csv:/proc/nowhere/a.csv", "tensorboard:/proc/nowhere/tb"])
def test_an_unwritable_path_is_refused(make_stride: MakeStride, kind: str) -> None:
    with raises_message(ConfigError, kind):
        make_stride(sinks=kind)


def test_a_port_in_use_is_refused_and_opened_sinks_are_closed(
    make_stride: MakeStride, tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra prometheus")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked = [f"csv:{tmp_path / 'a.csv'}", f"prometheus:{port}"]

        with raises_message(ConfigError, port):
            make_stride(sinks=asked, trace=tmp_path / "run")

    assert not (tmp_path / "run").exists(), "a refusal leaves no trace"


def test_an_address_of_another_machine_is_refused(make_stride: MakeStride) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra prometheus")

    with raises_message(ConfigError, "'prometheus:192.0.2.1:0'"):
        make_stride(sinks="prometheus:192.0.2.1:0")


def test_ipv4_and_ipv6_addresses_are_accepted() -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra prometheus")
    asked = ["prometheus:localhost:0"]
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        asked.append("prometheus:[::1]:0")

    sinks = open_sinks(asked)
    for sink in sinks.values():
        sink.close()

    assert list(sinks) == asked


@pytest.mark.parametrize(
    ("sink", "module", "package"),
    [
        ("prometheus:0", "prometheus_client", "prometheus-client"),
        ("tensorboard:runs/tb", "torch.utils.tensorboard", "tensorboard"),
        ("wandb", "wandb", "evenstride[wandb]"),
        ("mlflow:ours", "mlflow", "evenstride[mlflow]"),
    ],
)
def test_a_missing_package_is_named(
    make_stride: MakeStride,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sink: str,
    module: str,
    package: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)

    with raises_message(ConfigError, package):
        make_stride(sinks=sink)


def test_if_one_sink_fails_to_open_no_other_stays_open(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra prometheus")
    (port,) = free_ports(1)

    with raises_message(ConfigError, "'csv:/proc/nowhere/m.csv'"):
        open_sinks([f"prometheus:{port}", "csv:/proc/nowhere/m.csv"])

    with socket.create_server(("127.0.0.1", port)):
        pass


def test_an_invalid_trace_closes_the_sinks(make_stride: MakeStride, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra prometheus")
    (port,) = free_ports(1)

    with raises_message(ConfigError):
        make_stride(sinks=f"prometheus:{port}", trace="/proc/nowhere")

    make_stride(sinks=f"prometheus:{port}")


@pytest.mark.parametrize("part", [-0.1, 1, 1.5, "0.7", True, float("nan")])
def test_an_invalid_fraction_is_refused(make_stride: MakeStride, part: Any) -> None:
    with raises_message(ConfigError, "alert_below"):
        make_stride(alert_below=part)


@pytest.mark.parametrize("text", ["-0.1", "1", "some", "nan"])
def test_an_invalid_fraction_of_the_environment_is_refused(
    make_stride: MakeStride, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("EVENSTRIDE_ALERT_BELOW", text)

    with raises_message(ConfigError, "EVENSTRIDE_ALERT_BELOW", text):
        make_stride()
