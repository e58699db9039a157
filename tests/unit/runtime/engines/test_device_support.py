"""What devices can do, derived from facts; no card is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from evenstride.errors import ConfigError
from evenstride.runtime.engines.device_support import (
    WHEELS,
    RankDevice,
    accelerator,
    card_of,
    carried,
    check_backends,
    check_chosen,
    check_kind,
    complaint,
    likely_device,
    read_device,
    require,
    runs,
    wheel_for,
)
from evenstride.runtime.failures.peers import fingerprint, myself
from tests.messages import check_message, raises_message

CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CPU = RankDevice("cpu", "a processor", None, (), "2.13.0+cu130", "13.0", "emulated", True)
H100 = RankDevice("cuda", "NVIDIA H100", (9, 0), CU130, "2.13.0+cu130", "13.0", "native", True)
T4 = replace(H100, name="Tesla T4", capability=(7, 5), bf16="emulated")
V100 = replace(T4, name="Tesla V100", capability=(7, 0))
P100 = replace(V100, name="Tesla P100", capability=(6, 0), compile=False)


@pytest.mark.parametrize(
    ("entry", "capability", "answer"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_60", (6, 1), True),
        ("sm_61", (6, 0), False),
        ("sm_75", (7, 0), False),
        ("sm_70", (7, 5), True),
        ("compute_80", (8, 0), True),
        ("compute_80", (12, 0), True),
        ("compute_120", (9, 0), False),
        ("sm_100", (10, 3), True),
        ("sm_120", (12, 1), True),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("compute_90a", (10, 0), False),
        ("compute_100f", (10, 3), True),
        ("compute_100f", (12, 0), False),
        ("sm_80", (8, 7), False),
        ("sm_87", (8, 7), True),
        ("sm_87", (8, 9), False),
        ("compute_80", (8, 7), True),
        ("sm_101", (11, 0), True),
        ("gfx90a", (9, 0), False),
    ],
)
def test_code_runs_on_later_cards_of_its_generation_and_ptx_on_all_later_ones(
    entry: str, capability: tuple[int, int], answer: bool
) -> None:
    assert runs(entry, capability) is answer


@pytest.mark.parametrize("device", [H100, T4, CPU, replace(V100, arch_list=CU126)], ids=str)
def test_a_device_with_code_for_it_is_no_matter(device: RankDevice) -> None:
    assert carried(device)
    assert complaint(device) == ""
    assert require([device, device]) == ()


def test_unknown_facts_are_not_refused() -> None:
    for device in (replace(P100, arch_list=()), replace(P100, cuda=None, arch_list=("gfx90a",))):
        assert carried(device)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (P100, "Tesla P100 (Pascal, sm_60)"),
        (V100, "Tesla V100 (Volta, sm_70)"),
        (replace(P100, name="GTX 1080 Ti", capability=(6, 1)), "GTX 1080 Ti (Pascal, sm_61)"),
        (replace(P100, name="GTX 980", capability=(5, 2)), "GTX 980 (Maxwell, sm_52)"),
    ],
)
def test_a_card_that_the_wheel_has_no_code_for_is_refused_with_the_wheel_that_has(
    device: RankDevice, expected: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        require([H100, device])

    text = str(refused.value)
    check_message(text, "rank 1", expected, "2.13.0", "'torch==2.13.*'")
    assert "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120;" in text


def test_a_card_that_is_too_new_is_sent_to_a_later_wheel() -> None:
    b200 = RankDevice("cuda", "NVIDIA B200", (10, 0), CU126, "2.6.1+cu126", "12.6", "native", True)

    text = complaint(b200)

    check_message(text, "NVIDIA", "B200", "sm_100", "'torch==2.7.*'")
    # Every rank must have the same release.
    assert "whl/cu128" in text


def test_a_card_without_a_wheel_is_reported() -> None:
    for capability in ((3, 7), (8, 7), (7, 2)):
        text = complaint(replace(P100, capability=capability))

        check_message(text)
        assert "whl/" not in text


@pytest.mark.parametrize(
    ("capability", "release", "wheel"),
    [
        ((6, 1), "2.6.0", ("2.6", "cu126")),
        ((6, 0), "2.13.0+cu130", ("2.13", "cu126")),
        ((6, 0), "2.15.0", ("2.14", "cu126")),
        ((7, 0), "2.7.1+cu128", ("2.7", "cu126")),
        ((7, 0), "2.9.0", ("2.9", "cu128")),
        ((7, 0), "2.11.0+cu128", ("2.11", "cu126")),
        ((9, 0), "2.12.1", ("2.12", "cu130")),
        ((12, 0), "2.6.0+cu124", ("2.7", "cu128")),
        ((12, 1), "2.14.0.dev20260801", ("2.14", "cu130")),
        ((3, 5), "2.13.0", None),
    ],
)
def test_the_named_wheel_is_of_the_installed_release_if_one_exists(
    capability: tuple[int, int], release: str, wheel: tuple[str, str] | None
) -> None:
    assert wheel_for(capability, release) == wheel


@given(
    st.sampled_from([(5, 0), (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)]),
    st.integers(6, 20),
)
def test_the_wheel_named_exists_and_has_code_for_the_card(
    capability: tuple[int, int], minor: int
) -> None:
    found = wheel_for(capability, f"2.{minor}.0")

    assert found is not None
    release = tuple(map(int, found[0].split(".")))
    fitting = [
        wheel
        for wheel in WHEELS
        if wheel.tag == found[1]
        and wheel.first <= release
        and (wheel.last is None or release <= wheel.last)
    ]
    assert len(fitting) == 1
    assert any(runs(entry, capability) for entry in fitting[0].arch_list)


@pytest.mark.parametrize("device", [T4, replace(V100, arch_list=CU126)], ids=str)
def test_bf16_is_refused_of_a_card_that_only_emulates_it(device: RankDevice) -> None:
    with pytest.raises(ConfigError) as refused:
        require([H100, CPU, device], dtype=torch.bfloat16)

    text = str(refused.value)
    check_message(text, "rank 2", device.name, "8.0")


def test_missing_bf16_is_refused_on_a_cpu_too() -> None:
    with raises_message(ConfigError, "rank 0"):
        require([replace(CPU, bf16="no")], dtype=torch.bfloat16)


def test_emulated_bf16_on_a_processor_is_slow_but_possible() -> None:
    notes = require([H100, CPU, replace(CPU, bf16="native")], dtype=torch.bfloat16)

    check_message(notes, "rank 1")
    assert require([CPU, T4], dtype=torch.float16) == ()


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (replace(P100, arch_list=CU126), ("7.0",)),
        (replace(H100, compile=False), ()),
        (replace(CPU, compile=False), ()),
    ],
)
def test_compiling_is_refused_where_something_is_missing(
    device: RankDevice, reason: tuple[str, ...]
) -> None:
    assert require([H100, device]) == ()
    with pytest.raises(ConfigError) as refused:
        require([H100, device], compiled=True)

    text = str(refused.value)
    check_message(text, "torch.compile", "rank 1", *reason)


@pytest.mark.parametrize(
    ("kinds", "config"),
    [
        (["cpu", "cpu"], "gloo"),
        (["cpu", "cuda"], "gloo"),
        (["cpu", "cuda"], "cpu:gloo,cuda:gloo"),
        (["cuda", "cuda"], "nccl"),
        (["cuda", "cuda"], "cuda:nccl"),
        (["cuda", "cuda"], "cpu:gloo,cuda:nccl"),
        (["cpu", "cpu"], "cpu:gloo,cuda:nccl"),
        (["cpu", "cuda"], "mpi"),
        (["cpu"], "cpu:gloo, CUDA:NCCL"),
        ([], "nccl"),
    ],
)
def test_ranks_that_meet_on_one_backend_are_let_through(kinds: list[str], config: str) -> None:
    check_backends(kinds, [config] * len(kinds))


@pytest.mark.parametrize("kinds", [["cpu", "cuda"], ["cuda", "cuda", "cpu"]], ids=str)
def test_a_mapping_that_splits_the_ranks_is_refused(kinds: list[str]) -> None:
    with raises_message(ConfigError, "init_process_group"):
        check_backends(kinds, ["cpu:gloo,cuda:nccl"] * len(kinds))


@pytest.mark.parametrize(
    ("kinds", "config", "expected"),
    [
        (["cuda", "cpu"], "nccl", ("rank 1", "'nccl'")),
        (["cpu"], "cuda:nccl", ()),
        (["cuda"], "cpu:gloo", ("rank 0",)),
        (["cpu"], "cpu:none,cuda:none", ()),
        (["cpu"], "undefined", ()),
        (["xpu"], "gloo", ("rank 0",)),
    ],
)
def test_a_kind_without_a_backend_is_refused(
    kinds: list[str], config: str, expected: tuple[str, ...]
) -> None:
    with raises_message(ConfigError, *expected) as refused:
        check_backends(kinds, [config] * len(kinds))

    other = kinds[-1] not in ("cpu", "cuda")  # gloo does not serve it
    way = f"() with a backend that serves {kinds[-1]}" if other else '("gloo"), which'
    assert f"call init_process_group{way}" in str(refused.value)


@pytest.mark.parametrize(
    ("kinds", "configs", "facts"),
    [
        # What torch chooses on each rank if the script names no backend.
        (
            ["cuda", "cpu"],
            ["cuda:nccl", "cpu:gloo"],
            ("rank 0 (cuda) waits in nccl and rank 1 (cpu) waits in gloo", "'cuda:nccl', 'cpu:"),
        ),
        (
            ["cpu", "xpu", "cpu"],
            ["cpu:gloo,xpu:xccl"] * 3,
            ("ranks 0, 2 (cpu) wait in", "rank 1 (xpu)"),
        ),
    ],
)
def test_ranks_in_different_backends_are_named_with_the_backend_that_serves_all(
    kinds: list[str], configs: list[str], facts: tuple[str, ...]
) -> None:
    with raises_message(ConfigError, *facts, "use one type of device") as refused:
        check_backends(kinds, configs)

    of_gloo = "xpu" not in kinds
    assert ('call init_process_group("gloo") on every rank' in str(refused.value)) is of_gloo


@pytest.mark.parametrize("config", ["xla", "xla:xla"])
def test_a_process_group_of_xla_is_refused_by_name(config: str) -> None:
    with raises_message(ConfigError, "PyTorch/XLA", "DistributedDataParallel"):
        check_backends(["cpu"] * 2, [config] * 2)


def test_the_processor_here_is_read() -> None:
    device = read_device(torch.device("cpu"))

    assert (device.kind, device.capability, device.arch_list) == ("cpu", None, ())
    assert device.name
    assert device.torch == torch.__version__
    assert device.bf16 in ("native", "emulated")
    assert require([device], dtype=torch.bfloat16) == (
        ()
        if device.bf16 == "native"
        else (f"rank 0, {device.name}, emulates bfloat16, which is slower than float32 there",)
    )


@pytest.mark.parametrize(
    ("capability", "triton", "cuda", "bf16", "compiled"),
    [
        ((9, 0), True, "13.0", "native", True),
        ((8, 0), False, "12.6", "native", False),
        ((7, 5), True, "13.0", "emulated", True),
        ((6, 1), True, "12.6", "emulated", False),
        ((6, 0), True, None, "native", True),
    ],
)
def test_a_card_is_read_from_what_torch_says(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    triton: bool,
    cuda: str | None,
    bf16: str,
    compiled: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if triton else None)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/cc" if name == "cc" else None)

    device = read_device(torch.device("cuda", 0))

    known = capability if cuda else None  # ROCm counts otherwise
    assert (device.kind, device.name, device.capability) == ("cuda", "a card", known)
    assert (device.arch_list, device.cuda) == (("sm_80",), cuda)
    assert (device.bf16, device.compile) == (bf16, compiled)


def test_without_any_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)

    assert not read_device(torch.device("cpu")).compile


@pytest.mark.parametrize(
    ("found", "bf16"),
    [
        ({"avx512_bf16": True}, "native"),
        ({"amx_bf16": True}, "native"),
        ({"bf16": True, "neon": True}, "native"),
        ({"avx512_f": True, "amx_int8": True, "avx512_bf16": False}, "emulated"),
    ],
)
def test_a_processor_computes_bf16_if_it_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], bf16: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)

    assert read_device(torch.device("cpu")).bf16 == bf16


@pytest.mark.parametrize("kind", ["xpu", "mps", "hpu", "xla", "privateuseone:0"])
def test_a_device_whose_steps_cannot_be_timed_is_refused(kind: str) -> None:
    with raises_message(ConfigError, kind.partition(":")[0], "CUDA"):
        check_kind(torch.device(kind))


def test_a_model_without_a_device_is_refused() -> None:
    with raises_message(ConfigError, "to_empty"):
        check_kind(torch.device("meta"))


@pytest.mark.parametrize("kind", ["cpu", "cuda", "cuda:1"])
def test_a_device_whose_steps_can_be_timed_is_accepted(kind: str) -> None:
    check_kind(torch.device(kind))


@pytest.mark.parametrize(("bf16", "level"), [(True, "native"), (False, "no")])
def test_another_accelerator_is_read_from_its_module(
    monkeypatch: pytest.MonkeyPatch, bf16: bool, level: str
) -> None:
    module = SimpleNamespace(
        get_device_name=lambda _: "an accelerator", is_bf16_supported=lambda: bf16
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)

    device = read_device(torch.device("xpu", 0))

    assert (device.kind, device.name, device.bf16) == ("xpu", "an accelerator", level)
    assert device.compile
    assert require([device]) == ()


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("cuda", "cpu:gloo,cuda:nccl"),
        ("cuda", "cuda:nccl,cpu:gloo"),
        ("xpu", "cpu:gloo,cuda:nccl,xpu:xccl"),
    ],
)
def test_ranks_of_which_some_use_their_gpu_are_refused_where_it_matters(
    kind: str, backend: str
) -> None:
    with raises_message(ConfigError, "rank 0", "rank 2", f"torch.{kind}.set_device"):
        check_chosen([kind, "cpu", kind], [True, False, False], backend)


@pytest.mark.parametrize(
    ("kinds", "chosen", "backend"),
    [
        (["cuda", "cuda"], [True, True], "cpu:gloo,cuda:nccl"),
        (["cuda", "cuda"], [False, False], "cpu:gloo,cuda:nccl"),
        (["cpu", "cpu"], [False, False], "cpu:gloo,cuda:nccl"),
        (["cuda", "cpu"], [True, False], "gloo"),
        (["cuda", "cuda"], [True, False], "gloo"),
        (["cuda", "cuda"], [True, False], "nccl"),
        (["cuda", "cuda"], [True, False], "cpu:gloo,cuda:gloo"),
    ],
)
def test_ranks_are_accepted_that_are_alike_or_wait_in_one_library(
    kinds: list[str], chosen: list[bool], backend: str
) -> None:
    check_chosen(kinds, chosen, backend)


@dataclass
class Module:
    """What torch has for one type of accelerator, such as ``torch.cuda``."""

    started: bool = True
    current: int = 0
    count: int = 4
    available: bool = True

    def is_available(self) -> bool:
        return self.available

    def is_initialized(self) -> bool:
        return self.started

    def current_device(self) -> int:
        assert self.started, "this call starts the device"
        return self.current

    def device_count(self) -> int:
        return self.count


def _with(monkeypatch: pytest.MonkeyPatch, kind: str, module: Module, backend: str = "") -> Any:
    """Let this machine have an accelerator, and return a process group with a backend."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backend)
    return SimpleNamespace(bound_device_id=None)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize(
    ("bound", "current", "local", "count", "index"),
    [
        (2, 0, "1", 4, 2),  # what the group says
        (None, 3, "1", 4, 3),  # what the script has set
        (None, 0, "1", 4, 1),  # nothing was set yet
        (None, 0, "1", 1, 0),  # each rank sees its own card only
        (None, 0, "", 4, 0),
    ],
)
def test_a_rank_s_own_device_is_not_that_of_its_neighbours(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    bound: int | None,
    current: int,
    local: str,
    count: int,
    index: int,
) -> None:
    group = _with(monkeypatch, kind, Module(current=current, count=count), f"cpu:gloo,{kind}:own")
    monkeypatch.setenv("LOCAL_RANK", local)
    group.bound_device_id = None if bound is None else torch.device(kind, bound)

    assert likely_device(group) == torch.device(kind, index)


@pytest.mark.parametrize(
    ("backend", "started", "device"),
    [
        ("cpu:gloo,cuda:gloo", False, "cpu"),  # a rank of a mixed job that has a card
        ("cpu:gloo,cuda:nccl", False, "cpu"),
        ("cuda:nccl", False, "cuda:1"),  # it cannot compute elsewhere
        ("cpu:gloo,cuda:gloo", True, "cuda:1"),
        ("cpu:gloo", True, "cpu"),
    ],
)
def test_a_rank_that_has_not_used_its_card_computes_on_the_cpu_if_it_can(
    monkeypatch: pytest.MonkeyPatch, backend: str, started: bool, device: str
) -> None:
    group = _with(monkeypatch, "cuda", Module(started), backend)
    monkeypatch.setenv("LOCAL_RANK", "1")

    assert likely_device(group) == torch.device(device)
    assert likely_device() == torch.device("cuda:1"), "alone, a rank uses what there is"


def _raise() -> None:
    raise RuntimeError("Cannot access accelerator device when none is available.")


@pytest.mark.parametrize("found", [lambda: None, _raise], ids=["none", "torch 2.6"])
def test_without_a_card_a_rank_computes_on_the_processor(
    monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", found)

    assert likely_device(None) == torch.device("cpu")


def test_torch_for_a_card_that_the_machine_lacks_computes_on_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = _with(monkeypatch, "cuda", Module(available=False), "cpu:gloo,cuda:nccl")

    assert (accelerator(group), likely_device(group)) == ("", torch.device("cpu"))


def test_a_fingerprint_is_of_the_device_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {
        0: SimpleNamespace(name="A", total_memory=1 << 30),
        1: SimpleNamespace(name="B", total_memory=2 << 30),
    }
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards[device.index])

    devices = [myself(0, torch.device("cuda", index)).device for index in (0, 1)]
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    devices.append(myself(0, torch.device("xpu", 1)).device)
    fingerprint.cache_clear()

    assert devices.pop() == "xpu xpu"
    assert devices == ["cuda A 1024 MiB", "cuda B 2048 MiB"]


@pytest.mark.parametrize(
    ("properties", "card"),
    [({"uuid": 7, "name": "A"}, "7"), ({"name": "A"}, ""), (None, "")],
)
def test_a_card_is_known_by_an_identity_that_no_other_has(
    monkeypatch: pytest.MonkeyPatch, properties: dict[str, Any] | None, card: str
) -> None:
    module = SimpleNamespace()
    if properties is not None:
        module.get_device_properties = lambda _: SimpleNamespace(**properties)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)

    assert card_of(torch.device("xpu", 0)) == card
    assert card_of(torch.device("cpu")) == ""
