"""What ``evenstride doctor`` says about devices and the torch that drives them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenstride.lab.doctor import checkup
from evenstride.lab.doctor.checkup import examine_machine, examine_rank, tell
from evenstride.runtime.engines.device_support import RankDevice, own_device
from evenstride.runtime.failures.peers import fingerprint
from tests.messages import check_message
from tests.unit.lab.fake_runs import SpyLimits

OLD = RankDevice(
    "cuda", "Tesla P100", (6, 0), ("sm_75",), "2.13.0+cu130", "13.0", "emulated", False
)
GOOD = replace(OLD, name="NVIDIA L4", capability=(8, 9), arch_list=("sm_86",), bf16="native")


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A machine with two cards, the second one too old; returns the devices made current."""
    current: list[int] = []
    monkeypatch.setattr(checkup, "open_limits", lambda _: (SpyLimits(), ""))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: (GOOD, OLD)[index].name)
    properties = SimpleNamespace(name="a card", total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_86"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(device.index))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(checkup, "memory_bytes", lambda device: (24 - 8 * device.index) * 2**30)
    monkeypatch.setattr(checkup, "read_device", lambda device: (GOOD, OLD)[device.index])
    yield current
    fingerprint.cache_clear()


@pytest.mark.usefixtures("cards")
def test_every_gpu_of_a_machine_is_listed_with_its_abilities() -> None:
    findings = examine_machine()

    assert findings["devices"] == ["NVIDIA L4", "Tesla P100"]
    assert findings["wheel"] == "CUDA 13.0 for sm_75 sm_86"
    assert findings["capability"] == ["Ada, sm_89", "Pascal, sm_60"]
    assert findings["bf16"] == ["native", "emulated"]
    assert findings["compile"] == ["no", "no"]
    assert findings["memory_bytes"] == [24 * 2**30, 16 * 2**30]
    assert "whl/cu126" in findings["unusable"][0]
    assert len(findings["unusable"]) == 1
    assert json.loads(json.dumps(findings)) == findings
    lines = tell(findings).splitlines()
    assert "memory               24.0 GiB, 16.0 GiB" in lines
    assert "bf16                 native, emulated" in lines
    assert any(line.startswith("unusable             is Tesla P100") for line in lines)


def test_without_gpus_no_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(checkup, "open_limits", lambda _: (SpyLimits(), ""))

    lines = tell(examine_machine()).splitlines()

    assert not any(line.startswith(("capability", "unusable")) for line in lines)
    assert "wheel                no CUDA" in lines
    assert "devices              cpu" in lines


@pytest.mark.parametrize(("local", "index"), [("0", 0), ("1", 1), ("2", 0), (None, 0)])
def test_a_rank_takes_the_card_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, cards: list[int], local: str | None, index: int
) -> None:
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)

    assert own_device() == torch.device("cuda", index)
    assert cards == [index]


@pytest.mark.usefixtures("cards")
def test_a_rank_tells_of_its_own_card_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")

    mine = examine_rank(5)

    assert (mine["rank"], mine["kind"], mine["devices"]) == (5, "cuda", ["Tesla P100"])
    assert mine["capability"] == ["Pascal, sm_60"]
    assert mine["memory_bytes"] == [16 * 2**30]
    assert json.loads(json.dumps(mine)) == mine


@pytest.mark.usefixtures("cards")
def test_a_group_is_shown_with_the_wheel_and_abilities_of_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks: list[dict[str, Any]] = []
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        ranks.append({**examine_rank(rank), "gflops_per_s": 5.0})
    group = {
        "ranks": ranks,
        "gradient_error": 0.0,
        "exact": True,
        "all_reduce_latency_s": 1e-3,
        "all_reduce_bytes_per_s": 1e6,
        "slow": [],
        "same_torch": True,
        "backend_warning": "the ranks would hang",
    }

    lines = tell({"group": group}).splitlines()

    expected = (
        "wheel CUDA 13.0 for sm_75 sm_86; capability {}; bf16 {}; compile no; memory {} GiB; "
    )
    assert any(expected.format("Ada, sm_89", "native", "24.0") in line for line in lines)
    assert any(expected.format("Pascal, sm_60", "emulated", "16.0") in line for line in lines)
    assert len([line for line in lines if "rank 1 is Tesla P100" in line]) == 1
    assert not any("rank 0 is" in line for line in lines)
    check_message(lines)


@pytest.mark.parametrize(
    ("kinds", "warned"), [(["cpu", "cpu"], False), (["cuda"], False), (["cuda", "cpu"], True)]
)
def test_mixed_ranks_are_warned_of_the_usual_backends(kinds: list[str], warned: bool) -> None:
    text = checkup.backend_warning(kinds)

    assert ('init_process_group("gloo")' in text) is warned
    assert bool(text) is warned
