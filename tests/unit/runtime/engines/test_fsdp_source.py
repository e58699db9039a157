"""The installed torch waits where evenstride knows, and what moves is named."""

from __future__ import annotations

import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tools import check_fsdp

from evenstride.runtime.engines import fsdp
from evenstride.runtime.engines.fsdp import uncounted
from evenstride.runtime.engines.fsdp_source import FOLDER, MARKED, NEWEST, moved, what_moved

SITE = Path(torch.__file__).parents[1]
INSTALLED = {path.name: path.read_text("utf-8") for path in (SITE / FOLDER).glob("*.py")}


def test_every_wait_of_the_installed_fsdp_is_known() -> None:
    assert what_moved(INSTALLED) == [], (
        f"FSDP2 of torch {torch.__version__} waits in unknown places; read each, make "
        "fsdp_stalls.py mark it, and add it to fsdp_source.py"
    )
    assert moved() == moved(collectives_only=True) == ""


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("def late(g):\n  g.device_handle.current_stream().wait_event(g.e)", "late: waits for g.e"),
        ("def late(a, b):\n  a.wait_stream(b.compute)", "late: waits for b.compute"),
        ("def late(work):\n  work.wait()", "late: waits for work"),
        ("def late(event):\n  return [event.synchronize()]", "late: waits for event"),
        ("def late(t):\n  dist.all_reduce(t)", "late: runs all_reduce"),
        ("def late(t):\n  return funcol.all_gather_tensor(t)", "late: runs all_gather_tensor"),
        ("def late(g):\n  foreach_reduce(g)", "late: calls foreach_reduce"),
        ("def late(g):\n  return g.all_gather_comm(g)", "late: calls all_gather_comm"),
        ("class Late:\n  later = FSDPParamGroup.post_backward", "Late: takes post_backward"),
        ("def late(g):\n  FSDPParamGroup.post_backward(g)", "late: takes post_backward"),
        ("def late(g):\n  super(A, g).post_backward()", "late: takes post_backward"),
        ("def late(g):\n  g.hook(g.wait_for_unshard)", "late: takes wait_for_unshard"),
        ("async def late(g):\n  g.work.wait()", "late: waits for g.work"),
    ],
)
def test_an_unknown_wait_is_named(code: str, place: str) -> None:
    (found,) = what_moved(INSTALLED | {"late.py": code})

    assert found.startswith(place)
    assert found.endswith(" of late.py)")


@pytest.mark.parametrize(
    "code",
    [
        "def late(g):\n  g.comm_ctx.all_gather_stream.wait_event(g.event)",
        "def late(g):\n  g.post_backward()\n  g.groups[0].wait_for_unshard()",
        "def late(g):\n  dist.get_rank()\n  g.wait_until = 1",
    ],
)
def test_what_makes_no_work_wait_is_not(code: str) -> None:
    assert what_moved(INSTALLED | {"late.py": code}) == []


@pytest.mark.parametrize(
    "body",
    [
        "self.device_handle.current_stream().wait_event(self._post_reduce_event)",
        "if self.late: self.device_handle.current_stream().wait_event(self._post_reduce_event)",
        "if self._post_reduce_event is not None: pass\n"
        "    else: self.device_handle.current_stream().wait_event(self._post_reduce_event)",
    ],
)
def test_a_wait_under_another_condition_is_unknown(body: str) -> None:
    code = f"class FSDPParamGroup:\n  def _wait_for_post_backward(self):\n    {body}"

    (found,) = what_moved({**INSTALLED, "late.py": code})

    assert "._wait_for_post_backward: waits for self._post_reduce_event" in found


def test_a_collective_on_another_stream_is_unknown() -> None:
    code = "def foreach_reduce(o):\n  with o.stream(o.compute):\n    dist.all_reduce(o)"

    (found,) = what_moved({**INSTALLED, "late.py": code})

    assert found.startswith("foreach_reduce: runs all_reduce")


@pytest.mark.parametrize("name", [*MARKED, "_all_gather_result", "reduce_grads", "_training_state"])
def test_a_missing_name_is_named(name: str) -> None:
    texts = {file: text.replace(name, "other") for file, text in INSTALLED.items()}

    assert f"no FSDPParamGroup.{name}" in what_moved(texts)


def test_other_buffers_are_named() -> None:
    texts = {file: text.replace("reduce_scatter_state", "kept") for file, text in INSTALLED.items()}

    assert "no FSDPCommContext.reduce_scatter_states" in what_moved(texts)


def test_without_source_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    origin = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: origin)
    moved.cache_clear()

    assert moved() == "no FSDPParamGroup.unshard"
    moved.cache_clear()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_steps_of_an_unknown_release_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    group = SimpleNamespace(device=torch.device(device), _reduce_scatter_comm=None)
    for name in (*MARKED, "_all_gather_result", "_post_reduce_event", "_all_reduce_state"):
        setattr(group, name, None)
    group.comm_ctx = group.device_handle = None
    late = INSTALLED | {"late.py": "def late(t):\n  dist.all_reduce(t)"}

    def moved_in_late(**_: Any) -> str:
        return what_moved(late)[0]

    monkeypatch.setattr(fsdp, "moved", moved_in_late)
    monkeypatch.setattr("evenstride.runtime.engines.fsdp_stalls.moved", moved_in_late)
    monkeypatch.setattr(fsdp, "fsdp_parts", lambda _: [None])
    monkeypatch.setattr(fsdp, "parameter_groups", lambda _: [group])

    reason = uncounted(torch.nn.Linear(1, 1))

    assert f"torch {torch.__version__}" in reason
    assert "(late: runs all_reduce (line 2 of late.py))" in reason
    assert f"torch {NEWEST} or older" in reason


def test_a_wheel_is_checked_without_being_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "torch-9.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in INSTALLED.items():
            archive.writestr(f"{FOLDER}/{name}", text)

    assert check_fsdp.main([SITE, wheel]) == 0
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(f"{FOLDER}/late.py", "def late(work):\n  work.wait()")
    assert check_fsdp.main([wheel]) == 1

    assert capsys.readouterr().out.splitlines() == [
        f"{SITE.name}: every wait is known",
        "torch-9.whl: every wait is known",
        "torch-9.whl: late: waits for work (line 2 of late.py)",
    ]
