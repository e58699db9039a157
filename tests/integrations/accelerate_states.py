"""Further scripts: saved states, evaluation, refusals, FSDP version 2, and the example."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.utils.data import DataLoader

from evenstride.errors import EvenstrideError
from evenstride.integrations.accelerate import EvenAccelerator
from tests.integrations.accelerate_programs import (
    BATCH,
    EPOCHS,
    SAMPLES,
    Script,
    alone,
    forget,
    launched,
    ran,
    unequal,
)
from tests.multiproc.training import net, rows, weights


class Resuming(Script):
    """Saves a state in the midst of an epoch, or resumes as Accelerate's examples do."""

    def resume(self, folder: Path, updates: int) -> None:
        """Load a state and train to the end."""
        self.accelerator.load_state(str(folder))
        batches = updates * self.steps
        self.start, self.rest = divmod(batches, len(self.loader))
        self.train(range(self.start, EPOCHS))

    def active(self, epoch: int) -> Any:
        """Return the loader, from which a resumed epoch's first batches are skipped."""
        if epoch == getattr(self, "start", None):
            return self.accelerator.skip_first_batches(self.loader, self.rest)
        return self.loader


CUT = {1: 1, 3: 4}  # updates before the state is saved that so many processes load
WHOLE = 20  # samples of an update


def cut_and_whole(rank: int, folder: str) -> dict[str, Any]:
    """Train on two ranks and save after some updates; also train to the end at once."""
    found: dict[str, Any] = {}
    with launched(rank, 2):
        for updates in CUT.values():
            script = Resuming(steps=2)
            script.train(stop=updates)
            script.accelerator.save_state(str(Path(folder, f"after {updates}")))
            found[str(updates)] = script.results()
        found["whole"] = ran(Resuming(steps=2))
        found["mid-update"] = in_flight()
    return found


def resumed(rank: int, folder: str, updates: int, world_size: int) -> dict[str, Any]:
    """Resume with another number of processes, and without the number that it needs."""
    with launched(rank, world_size):
        script = Resuming(steps=2, options={"global_batch": WHOLE})
        script.resume(Path(folder), updates)
        found = script.results()
        script = Resuming(steps=2)
        found["unfixed"] = refused(lambda: script.accelerator.load_state(folder))
        script.results()
    return found


def in_flight() -> str:
    """Say what saving between a backward pass and its optimizer step ends with."""
    script, said = Script(), ""
    for _, x, y in script.loader:
        script.accelerator.backward(F.mse_loss(script.model(x), y))
        said = refused(lambda: script.accelerator.save_state("/nonexistent/never-written"))
        break
    script.results()
    return said


def refused(run: Callable[[], object]) -> str:
    """Return the kind and the words of the error that a call ends with."""
    try:
        run()
    except EvenstrideError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def evaluating(rank: int) -> dict[str, Any]:
    """Gather metrics over unequal, missing and empty batches."""
    with launched(rank, 2):
        return {
            f"{size} in {batch}, {parts}": metrics(size, batch, parts)
            for size, batch in SIZES
            for parts in ((1, 3), (0, 1))
        }


SIZES = ((37, 4), (9, 2), (3, 1), (1, 4))


def metrics(size: int, batch: int, parts: tuple[int, ...]) -> dict[str, Any]:
    """Return what an evaluation gathers, as a script does it."""
    accelerator = EvenAccelerator(cpu=True, policy=unequal(2 * BATCH, parts))
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loaders = [
        DataLoader(rows(SAMPLES), batch_size=BATCH, shuffle=True),
        DataLoader(rows(size), batch_size=batch),
        DataLoader(rows(size), batch_size=batch, drop_last=True),
    ]
    model, _, _, loader, other = accelerator.prepare(module, optimizer, *loaders)
    found: dict[str, Any] = {
        "ids": [],
        "texts": [],
        "numbers": 0,
        "sizes": [],
        "other": [],
        "ends": [],
    }
    for ids, x, y in loader:
        with torch.no_grad():
            error = (model(x) - y).square().flatten()
        found["numbers"] += 1
        found["ends"].append(accelerator.gradient_state.end_of_dataloader)
        both = accelerator.gather_for_metrics({"ids": ids, "error": error})
        assert len(both["ids"]) == len(both["error"])
        found["ids"] += both["ids"].tolist()
        found["texts"] += accelerator.gather_for_metrics([str(i) for i in ids.tolist()])
        found["sizes"].append(len(accelerator.gather_for_metrics(error.mean())))
    for ids, _, _ in other:
        found["other"] += accelerator.gather_for_metrics(ids).tolist()
    uneven = torch.arange(accelerator.process_index + 1)
    found["gathered"] = accelerator.gather([uneven, uneven[:1]])[0].tolist()
    found["length"] = len(loader)
    accelerator.free_memory()
    forget()
    return found


def set_up(rank: int) -> dict[str, str]:
    """Return the refusals that need several processes."""
    from accelerate.local_sgd import LocalSGD
    from accelerate.utils import find_executable_batch_size

    found = {}
    with launched(rank, 2):
        script = Script()
        found["local"] = refused(lambda: LocalSGD(script.accelerator, script.model, 8))
        script.results()

        @find_executable_batch_size(starting_batch_size=8)  # type: ignore[untyped-decorator]
        def train(batch_size: int) -> None:
            Script(batch=batch_size)

        found["retried"] = refused(train)
        forget()
        with pytest.MonkeyPatch.context() as patch:
            sharded(patch)
            found["FSDP1"] = refused(
                lambda: EvenAccelerator(
                    cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1)
                )
            )
            forget()
    return found


def sharded(patch: pytest.MonkeyPatch) -> None:
    """Let Accelerate shard models over CPU processes, which it does on accelerators only."""
    begin = AcceleratorState.__init__

    def begun(state: Any, *args: Any, **options: Any) -> None:
        begin(state, *args, **options)
        plugin = options.get("fsdp_plugin")
        if plugin is not None:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    patch.setattr(AcceleratorState, "__init__", begun)


def whole(tensor: Any) -> Tensor:
    """Return a sharded tensor as a whole; collective."""
    full: Tensor = tensor.full_tensor().detach()
    return full


def fully_sharded(rank: int, folder: str) -> dict[str, Any]:
    """Train with FSDP version 2 in two batches per update; save in the midst, and resume."""
    with launched(rank, 2) as patch:
        sharded(patch)
        found = {"whole": shard_and_train(None, None)}
        found["cut"] = shard_and_train(folder, None)
        found["rest"] = shard_and_train(None, folder)
        forget()
        found["alone"] = alone(20, found["whole"]["rates"])
    return found


SAVED = 4  # updates, in the midst of the second epoch


def shard_and_train(save: str | None, load: str | None) -> dict[str, Any]:
    """Return what came of a sharded run; it ends where it saves."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    script = Sharded(steps=2, options={"fsdp_plugin": plugin})
    if load:
        script.accelerator.load_state(load)
    script.train(range(script.accelerator.stride.epoch, EPOCHS), stop=SAVED if save else None)
    if save:
        script.accelerator.save_state(save)
    found = {
        "gradients": script.gradients,
        "rates": script.rates,
        "weights": script.flat(lambda p: p),
        "sizes": script.sizes,
        "loaded": script.data.indices,
    }
    script.accelerator.free_memory()
    forget()
    return found


class Sharded(Script):
    """A script whose weights and gradients are DTensors."""

    def flat(self, part: Callable[[Any], Any]) -> list[float]:
        """Return a part of each parameter as numbers; collective."""
        parts = [whole(part(p)).reshape(-1) for p in self.model.parameters()]
        return torch.cat(parts).tolist()

    def update(self) -> None:
        """Note whole gradients."""
        if self.accelerator.sync_gradients:
            self.gradients.append(self.flat(lambda p: p.grad))
        self.optimizer.step()
        self.scheduler.step()
        if self.accelerator.sync_gradients:
            self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.zero_grad()


def example(rank: int, folder: str, world_size: int) -> dict[str, Any]:
    """Run the example: at once, in two parts, and with Accelerate alone."""
    from examples import accelerate_loop

    size = 100 // world_size
    small = ("--cpu", "--epochs", "2", "--width", "16", "--batch-size", str(size))
    saving = ("--checkpoint", folder, "--save-every", "20")
    torch.set_default_dtype(torch.float64)
    try:
        with launched(rank, world_size) as patch:
            patch.setenv("EVENSTRIDE_POLICY", unequal(100))
            found = {"whole": printed(accelerate_loop, small)}
            if world_size > 1:
                patch.setenv("EVENSTRIDE_MAX_STEPS", "20")  # of 30
                printed(accelerate_loop, (*small, *saving))
                patch.delenv("EVENSTRIDE_MAX_STEPS")
                found["rest"] = printed(accelerate_loop, (*small, *saving))
                patch.setattr(accelerate_loop, "EvenAccelerator", Accelerator)
                found["plain"] = printed(accelerate_loop, small)
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def printed(module: Any, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return what a run of an example prints, and its weights if it came to its end."""
    out, found = io.StringIO(), None
    # A script ends the process group, which other runs of this process need.
    with (
        patch.object(PartialState, "destroy_process_group"),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        found = weights(module.main(module.arguments().parse_args(list(arguments))))
    forget()
    return {"lines": out.getvalue().splitlines(), "weights": found}
