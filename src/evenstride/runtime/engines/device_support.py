"""What a rank's device and its torch can do, and errors for what they lack.

The facts are read once (`read_device`). Everything else is a pure function of them, so tests can
check the behaviour for a card without having one.

Which machine code runs where: CUDA C++ programming guide, "binary compatibility" (code for X.y runs
on X.z with z >= y) and "PTX compatibility" (PTX for X.y is translated for any newer card). The
exceptions for integrated chips and the suffixes are as in ``DEVICE_REQUIREMENT`` of torch 2.13's
``torch/cuda/__init__.py``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from evenstride.errors import ConfigError
from evenstride.runtime.timing.device_timer import untimed

Capability = tuple[int, int]
Bf16 = Literal["native", "emulated", "no"]


@dataclass(frozen=True, slots=True)
class RankDevice:
    """One rank's device, and the torch that uses it."""

    kind: str  # type of its `torch.device`, such as ``cuda``
    name: str  # as its maker names it
    capability: Capability | None  # ``(major, minor)`` of a CUDA device.
    # Machine code (``sm_80``) or PTX (``compute_90``) in torch; empty if unknown.
    arch_list: tuple[str, ...]
    torch: str  # such as ``2.13.0+cu130``
    cuda: str | None  # CUDA version of torch; ``None`` without, or with ROCm
    bf16: Bf16
    compile: bool  # whether ``torch.compile`` finds what it needs

    @property
    def architecture(self) -> str:
        """``Volta, sm_70`` for a CUDA device with a known architecture; ``""`` for others."""
        if self.capability is None:
            return ""
        return f"{_generation(self.capability)}, sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True, slots=True)
class Wheel:
    """The CUDA wheels of some torch releases with the same code."""

    tag: str  # last part of the wheel's index, such as ``cu126``
    first: Capability  # release, ``(major, minor)``
    last: Capability | None  # ``None`` if no end is known
    arch_list: tuple[str, ...]


_UP_TO_HOPPER = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
_FROM_TURING = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")

WHEELS: tuple[Wheel, ...] = (
    Wheel("cu124", (2, 6), (2, 6), _UP_TO_HOPPER),
    Wheel("cu126", (2, 6), (2, 14), _UP_TO_HOPPER),
    Wheel("cu128", (2, 7), (2, 7), _FROM_TURING),
    Wheel("cu128", (2, 8), (2, 10), ("sm_70", *_FROM_TURING)),
    Wheel("cu128", (2, 11), (2, 11), _FROM_TURING),
    Wheel("cu130", (2, 9), None, _FROM_TURING),
)
"""The wheels for Linux on x86-64 since torch 2.6, one CUDA version of each kind.

Source:
    Lists read from wheels: pytorch#144071 (2.6 cu124), pytorch#182250 (2.10 and 2.11),
    nikopueringer/CorridorKey#141 (2.7 and 2.10). Plans and tables: pytorch#157517 (2.8: CUDA 12.8
    and 12.9 drop Maxwell and Pascal, CUDA 13 has none below Turing). Also pytorch#164471 (2.9),
    pytorch#172352 and #175253 (2.11: CUDA 12.8 drops Volta), pytorch#182849 (2.12: no CUDA 12.8),
    pytorch#190355 (2.14 keeps CUDA 12.6) and #190385 (2.15 is to drop it). ``cu130`` wheels of some
    releases also have PTX for 12.0, which is not relied on here.
"""

# Chips on one board with their processor: they run only code made for them.
_INTEGRATED: dict[Capability, frozenset[Capability]] = {
    (5, 3): frozenset({(5, 3)}),
    (6, 2): frozenset({(6, 2)}),
    (7, 2): frozenset({(7, 2)}),
    (8, 7): frozenset({(8, 7)}),
    (10, 1): frozenset({(10, 1)}),
    (11, 0): frozenset({(10, 1), (11, 0)}),  # 10.1 was renamed
}
_OLDEST_FOR_TRITON, _OLDEST_WITH_BF16 = (7, 0), (8, 0)
_NO_XLA = (
    "PyTorch/XLA compiles a step as one graph, again for each batch size, and its devices have no "
    "events by which evenstride could time a step; use DistributedDataParallel or fully_shard on "
    "CPU, CUDA or ROCm"
)
_OF_GLOO = ("cpu", "cuda")  # types of devices between which gloo moves data
_ENTRY = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


def runs(entry: str, capability: Capability) -> bool:
    """Return whether one entry of an architecture list runs on a card.

    An entry is ``sm_86`` for machine code or ``compute_90`` for PTX. A suffix ``a`` binds it to
    that very architecture, ``f`` to its family (the same major number).

    >>> runs("sm_80", (8, 6)), runs("sm_86", (8, 0)), runs("compute_80", (9, 0))
    (True, False, True)
    """
    parts = _ENTRY.fullmatch(entry)
    if parts is None:
        return False
    ptx, made_for = parts[1] == "compute", (int(parts[2]), int(parts[3]))
    if parts[4] == "a":
        return made_for == capability
    if ptx and not parts[4]:
        return made_for <= capability
    if not ptx and (made_for in _INTEGRATED or capability in _INTEGRATED):
        return made_for in _INTEGRATED.get(capability, ())
    return made_for[0] == capability[0] and made_for[1] <= capability[1]


def carried(device: RankDevice) -> bool:
    """Return whether the installed torch has code for the device; true if that is unknown."""
    if device.cuda is None or device.capability is None or not device.arch_list:
        return True
    return any(runs(entry, device.capability) for entry in device.arch_list)


def wheel_for(capability: Capability, release: str) -> tuple[str, str] | None:
    """Return the wheel with code for a card: release (``2.13``) and tag (``cu126``).

    That is the installed release's own wheel if one fits, otherwise that of the nearest release. Of
    several it is the one with the latest CUDA.
    """
    asked = _release(release)
    fitting: list[tuple[int, int, Capability, str]] = []
    for wheel in WHEELS:
        if any(runs(entry, capability) for entry in wheel.arch_list):
            nearest = max(wheel.first, min(asked, wheel.last or asked))
            away = 1000 * abs(nearest[0] - asked[0]) + abs(nearest[1] - asked[1])
            fitting.append((away, -int(wheel.tag[2:]), nearest, wheel.tag))
    if not fitting:
        return None
    _, _, nearest, tag = min(fitting)
    return f"{nearest[0]}.{nearest[1]}", tag


def complaint(device: RankDevice) -> str:
    """Return the problem of a device with the installed torch and the remedy, or ``""``.

    The text continues after a name: "is Tesla P100 (Pascal, sm_60), for which ...".
    """
    if device.capability is None or carried(device):
        return ""
    return (
        f"is {device.name} ({device.architecture}), for which torch {device.torch} has no code: "
        f"it has {' '.join(device.arch_list)}; {_remedy(device.capability, device.torch)}, or "
        "leave that rank out"
    )


def require(
    devices: Sequence[RankDevice], *, dtype: torch.dtype = torch.float32, compiled: bool = False
) -> tuple[str, ...]:
    """Raise for what some rank's device cannot do; return sentences on what is slow.

    ``dtype`` is that of forward and backward pass. Sources: bfloat16 from compute capability 8.0 on
    as in ``torch.cuda.is_bf16_supported``, Triton from 7.0 on as in ``GPUTooOldForTriton``.
    """
    for rank, device in enumerate(devices):
        wrong = complaint(device)
        if wrong:
            raise ConfigError(f"rank {rank} {wrong}")
        if dtype is torch.bfloat16 and not _computes_bf16(device):
            raise ConfigError(
                f"the model uses bfloat16, but rank {rank} is {_named(device)}, which "
                f"{_why_no_bf16(device)}; use float16 or float32 on all ranks, or leave that "
                "rank out"
            )
        if compiled and not device.compile:
            raise ConfigError(
                f"the model uses torch.compile, but on rank {rank}, {_named(device)}, "
                f"{_why_no_compile(device)}; run the model eagerly on all ranks, or leave that "
                "rank out"
            )
    if dtype is not torch.bfloat16:
        return ()
    return tuple(
        f"rank {rank}, {_named(device)}, emulates bfloat16, which is slower than float32 there"
        for rank, device in enumerate(devices)
        if device.bf16 == "emulated"
    )


def check_kind(device: torch.device) -> None:
    """Refuse a device whose steps evenstride cannot time."""
    if device.type == "meta":
        raise ConfigError(
            "watch() got a model whose parameters are on the meta device, so its device is "
            "unknown; call watch() after to_empty() and the initialisation of the weights"
        )
    if device.type == "xla":
        raise ConfigError(f"watch() got a model on {device.type!r}: {_NO_XLA}")
    if why := untimed(device):
        raise ConfigError(
            f"watch() got a model on {device.type!r}, but evenstride cannot time steps there: "
            f"{why}; use CPU, CUDA (ROCm included) or an accelerator with timed events"
        )


def check_backends(kinds: Sequence[str], backend_configs: Sequence[str]) -> None:
    """Refuse a process group in which ranks would wait for each other in different backends.

    Both are in rank order. A config is what ``torch.distributed.get_backend_config(group)`` returns
    on the rank: ``cpu:gloo,cuda:nccl``, or one name for all device types that it serves. It differs
    between ranks if torch chose the backend by the rank's device.
    """
    for rank, (kind, config) in enumerate(zip(kinds, backend_configs, strict=True)):
        served = _served(config)
        if "xla" in served.values():
            raise ConfigError(f"the process group has the backend {config!r}: {_NO_XLA}")
        if kind not in served:
            way = 'call init_process_group("gloo"), which serves both'
            if kind not in _OF_GLOO:
                way = f"call init_process_group() with a backend that serves {kind}"
            raise ConfigError(
                f"rank {rank} computes on {kind}, but the process group's backend "
                f"{config!r} serves {' and '.join(served) or 'no device'} only; {way}, or give "
                "that rank another device"
            )
    # Ranks on different backends hang at the first collective.
    met: dict[tuple[str, str], list[int]] = {}
    for rank, (kind, config) in enumerate(zip(kinds, backend_configs, strict=True)):
        met.setdefault((backend_of(kind, config), kind), []).append(rank)
    if len({backend for backend, _ in met}) > 1:
        ways = " and ".join(
            f"{'ranks' if ranks[1:] else 'rank'} {', '.join(map(str, ranks[:8]))} ({kind}) "
            f"{'wait' if ranks[1:] else 'waits'} in {backend}"
            for (backend, kind), ranks in met.items()
        )
        shown = ", ".join(map(repr, dict.fromkeys(backend_configs)))
        gloo = 'call init_process_group("gloo") on every rank, so that all wait in gloo, or '
        raise ConfigError(
            f"with the process group's backend {shown}, {ways}, so they wait for each other for "
            f"ever; {gloo if set(kinds) <= set(_OF_GLOO) else ''}use one type of device"
        )


def check_chosen(kinds: Sequence[str], chosen: Sequence[bool], backend_config: str) -> None:
    """Refuse ranks of which only some use their accelerator, if that decides where they wait.

    ``kinds`` are the types of the ranks' accelerators, ``cpu`` without one.
    """
    cpu = backend_of("cpu", backend_config)
    for kind in dict.fromkeys(kinds):
        ranks = {chosen[rank]: rank for rank, other in enumerate(kinds) if other == kind}
        waits_in = backend_of(kind, backend_config)
        if kind == "cpu" or len(ranks) < 2 or not cpu or not waits_in or cpu == waits_in:
            continue
        raise ConfigError(
            f"rank {ranks[True]} uses its GPU, but rank {ranks[False]} does not use "
            f"its own yet. With the process group's backend {backend_config!r}, CPU and "
            f"{kind.upper()} ranks would wait in different backends, which never ends. Ranks that "
            f"compute on a GPU must call torch.{kind}.set_device(local_rank) before Stride(). If "
            'some compute on the CPU, call init_process_group("gloo")'
        )


def accelerator(group: dist.ProcessGroup | None = None) -> str:
    """Return the type of this machine's accelerator; empty without one that the group serves."""
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises without one
        return ""
    if found is None or not torch.get_device_module(found).is_available():
        return ""
    if group is not None and not backend_of(found.type, dist.get_backend_config(group)):
        return ""
    return found.type


def has_chosen(kind: str, group: dist.ProcessGroup | None) -> bool:
    """Return whether this process uses an accelerator, or its process group is bound to one."""
    bound = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == kind:
        return True
    started = getattr(torch.get_device_module(kind), "is_initialized", None)
    return started is None or bool(started())


def backend_of(kind: str, backend_config: str) -> str:
    """Return the backend for ranks on a device type; empty without one."""
    return _served(backend_config).get(kind, "")


def likely_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device on which this rank probably computes, before it has a model.

    A rank that has not used the accelerator of its machine yet is assumed to compute on the CPU, if
    its group serves both.
    """
    bound = getattr(group, "bound_device_id", None)
    if isinstance(bound, torch.device):
        return bound
    kind = accelerator(group)
    if not kind:
        return torch.device("cpu")
    # Asking for the current device would start the accelerator, even for a rank on the CPU.
    started, module = has_chosen(kind, group), torch.get_device_module(kind)
    if not started and group is not None and backend_of("cpu", dist.get_backend_config(group)):
        return torch.device("cpu")
    current = int(module.current_device()) if started else 0
    local = os.environ.get("LOCAL_RANK", "")
    # A rank that has not called set_device has device 0, like all others of its host; the local
    # rank distinguishes them.
    if current == 0 and local.isdecimal() and int(local) < module.device_count():
        current = int(local)
    return torch.device(kind, current)


def own_device() -> torch.device:
    """Return the device this process trains on, and make it the current one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = dist.get_node_local_rank(fallback_rank=0) if dist.is_available() else 0
    # The local rank may exceed the number of devices that the process sees.
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def read_device(device: torch.device) -> RankDevice:
    """Return the facts about a device of this process. Takes a moment if CUDA starts first."""
    common = (torch.__version__, torch.version.cuda)
    if device.type not in ("cpu", "cuda"):
        module: Any = torch.get_device_module(device)
        bf16 = getattr(module, "is_bf16_supported", lambda: True)()
        # Whether torch.compile works there is not known; torch itself says if it does not.
        name = device_name(device)
        return RankDevice(
            device.type, name, None, (), *common, "native" if bf16 else "no", compile=True
        )
    if device.type != "cuda":
        compiler = any(map(shutil.which, ("g++", "clang++")))
        return RankDevice("cpu", _processor(), None, (), *common, _bf16_of_processor(), compiler)
    compiler = any(map(shutil.which, ("gcc", "clang", "cc")))
    found = torch.cuda.get_device_capability(device)
    capability = (int(found[0]), int(found[1]))
    triton = importlib.util.find_spec("triton") is not None
    rocm = torch.version.cuda is None
    return RankDevice(
        "cuda",
        torch.cuda.get_device_name(device),
        None if rocm else capability,
        tuple(torch.cuda.get_arch_list()),
        *common,
        "native" if rocm or capability >= _OLDEST_WITH_BF16 else "emulated",
        compiler and triton and (rocm or capability >= _OLDEST_FOR_TRITON),
    )


def device_name(device: torch.device) -> str:
    """Return an accelerator's name as its maker gives it, or its type if it gives none."""
    module: Any = torch.get_device_module(device)
    named = getattr(module, "get_device_name", None)
    return device.type if named is None else str(named(device))


def card_of(device: torch.device) -> str:
    """Return a text that only this accelerator has, on any machine; empty if it has none.

    An index is none: two ranks may see the same card under different indices.
    """
    if device.type == "cpu":
        return ""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    return "" if uuid is None else str(uuid)


def _release(version: str) -> Capability:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def _remedy(capability: Capability, version: str) -> str:
    wheel = wheel_for(capability, version)
    if wheel is None:
        return "no wheel known to evenstride has it; build torch from source for that card"
    release, tag = wheel
    there = "there" if _release(release) == _release(version) else "on every rank"
    return (
        f"install {there} the wheel that has it: pip install 'torch=={release}.*' --index-url "
        f"https://download.pytorch.org/whl/{tag}"
    )


def _generation(capability: Capability) -> str:
    if capability >= (7, 5) and capability[0] == 7:
        return "Turing"
    if capability == (8, 9):
        return "Ada"
    names = {3: "Kepler", 5: "Maxwell", 6: "Pascal", 7: "Volta", 8: "Ampere", 9: "Hopper"}
    return names.get(capability[0], "Blackwell" if 10 <= capability[0] <= 12 else "unknown")


def _named(device: RankDevice) -> str:
    return f"{device.name} ({device.architecture})" if device.architecture else device.name


def _computes_bf16(device: RankDevice) -> bool:
    """Return whether a device may use bfloat16: processors may emulate it, cards may not."""
    return device.bf16 == "native" or (device.kind == "cpu" and device.bf16 == "emulated")


def _why_no_bf16(device: RankDevice) -> str:
    if device.kind == "cpu" or device.bf16 == "no":
        return "has no bfloat16"
    return "only emulates it (native bfloat16 needs compute capability 8.0)"


def _why_no_compile(device: RankDevice) -> str:
    if device.capability is not None and device.capability < _OLDEST_FOR_TRITON:
        return "Triton needs compute capability 7.0"
    if device.kind == "cuda":
        return "Triton or a C compiler is missing"
    return "no C++ compiler is installed"


def _served(backend_config: str) -> dict[str, str]:
    served: dict[str, str] = {}
    for part in filter(None, (part.strip().lower() for part in backend_config.split(","))):
        kind, colon, backend = part.partition(":")
        if colon:
            served[kind] = backend
        else:  # a bare name stands for all device types that it serves
            served |= dict.fromkeys(("cuda",) if part == "nccl" else _OF_GLOO, part)
    return {k: v for k, v in served.items() if v not in ("", "none", "undefined")}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:  # noqa: PTH123
            names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
            return next(names, "").strip() or "cpu"
    except OSError:  # not Linux
        return "cpu"


def _bf16_of_processor() -> Bf16:
    """Return whether the processor has instructions for bfloat16; otherwise torch emulates it."""
    tell = getattr(torch.cpu, "get_capabilities", None)
    if tell is not None:
        found = tell()
        native = any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    else:  # older releases
        old = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        native = any(getattr(torch.cpu, name, bool)() for name in old)
    return "native" if native else "emulated"
