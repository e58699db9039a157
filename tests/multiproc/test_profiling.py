"""A profile of a real script, as ``evenstride profile`` measures it."""

from __future__ import annotations

from pathlib import Path

from evenstride.errors import ConfigError, LaunchError
from evenstride.lab.profiling import Measuring, profile
from tests.messages import raises_message

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
import evenstride
from evenstride.runtime.loading import loader_options

loader_options._FEWEST_STEPS = 8  # a size with 3 or more in a pass is kept, however slow they are
most = int(sys.argv[1])
stride = evenstride.Stride(global_batch=64, seed=0)
net = stride.watch(torch.nn.Linear(8, 4))
for x, y in stride.loader(TensorDataset(torch.randn(640, 8), torch.randn(640, 4))):
    if len(x) > most:
        raise MemoryError(f"{len(x)} samples do not fit")
    stride.scale(torch.nn.functional.mse_loss(net(x), y)).backward()
    net.zero_grad()
"""


def measuring(folder: Path, script: str, *arguments: str) -> Measuring:
    path = folder / "train.py"
    path.write_text(script)
    return Measuring((str(path), *arguments), "box", (1.0, 0.25, 0.5), 0.3, "2026-05-01")


def test_steps_of_every_size_are_measured_and_the_workload_is_described(tmp_path: Path) -> None:
    found = profile(measuring(tmp_path, SCRIPT, "64"))

    (device,) = found.devices
    assert [point.samples for point in device.points] == [16, 32, 64]
    assert all(point.steps >= 3 and point.step_s > 0 for point in device.points)
    assert device.most_samples is None
    assert (found.model.parameters, found.model.gradient_bytes) == (36, 144.0)
    assert (found.samples, found.global_batch) == (640, 64)
    assert (device.type, found.script) == ("box", "train.py 64")
    assert device.computed_on == "cpu"
    assert all(point.drift > 0 for point in device.points)


def test_what_does_not_fit_is_the_limit(tmp_path: Path) -> None:
    reported = list[str]()

    found = profile(measuring(tmp_path, SCRIPT, "40"), reported.append)

    (device,) = found.devices
    assert [point.samples for point in device.points] == [16, 32]
    assert device.most_samples == 32
    assert "64 samples do not fit" in reported[0]


def test_a_script_that_fails_for_another_reason_has_no_profile(tmp_path: Path) -> None:
    with raises_message(LaunchError):
        profile(
            measuring(
                tmp_path, SCRIPT.replace("MemoryError(f", "OSError(f'no space left' + f"), "40"
            )
        )


def test_a_script_that_fails_at_once_is_reported_with_its_output(tmp_path: Path) -> None:
    with raises_message(LaunchError, "16 samples"):
        profile(measuring(tmp_path, SCRIPT, "8"))


def test_a_script_without_a_stride_is_refused(tmp_path: Path) -> None:
    with raises_message(ConfigError, "train.py"):
        profile(measuring(tmp_path, "print('done')"))
    with raises_message(ConfigError, "nowhere.py"):
        profile(Measuring(("nowhere.py",), "box", (1.0,), 1.0, "2026-05-01"))
