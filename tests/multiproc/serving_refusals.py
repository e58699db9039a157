"""Loops that training over parameter servers refuses, one rank of two each."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import evenstride
from evenstride.runtime.parameter_server import server_calls
from evenstride.runtime.parameter_server.rpc_agent import RpcRendezvous
from evenstride.runtime.parameter_server.server_calls import ServerProcess
from tests.inside import session
from tests.multiproc.training import net, rows


class Odd(torch.optim.SGD):
    """An optimizer that fails once it has made a step."""

    def step(self, closure: Any = None) -> Any:
        """Step once, then fail."""
        if self.defaults.setdefault("stepped", False):
            raise ValueError("this optimizer has had enough")
        self.defaults["stepped"] = True
        return super().step(closure)


def loop(rank: int, wrong: str) -> str:
    """Do something wrong in the second step and return the error's text."""
    del rank
    sync = "asp" if wrong in ("several", "twice") else "bsp-ps"
    stride = evenstride.Stride(global_batch=8, policy="uniform", sync=sync)
    loader, module = stride.loader(rows(64)), net()
    first = next(module.parameters()).requires_grad_(wrong != "unfrozen")
    model: nn.Module = module if wrong == "unwatched" else stride.watch(module)
    kind = Odd if wrong == "fails" else torch.optim.SGD
    optimizer: torch.optim.Optimizer = kind(module.parameters(), lr=0.01)
    other = torch.optim.SGD(module.parameters(), lr=0.01)
    reported = ""
    try:
        for number, (_, x, y) in enumerate(loader):
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            if number and wrong == "left out":
                session(stride).step.optimizers.after_step()  # as a scaler's update tells it
            (other if number == 1 and wrong == "in turns" else optimizer).step()
            if wrong in ("several", "twice"):
                (other if wrong == "several" else optimizer).step()
            optimizer.zero_grad()
            first.requires_grad_()
            if wrong == "clamped":
                with torch.no_grad():
                    next(module.parameters()).clamp_(-0.1, 0.1)
    except evenstride.errors.EvenstrideError as error:
        reported = str(error)
    stride.close()
    return reported


def smaller(rank: int) -> list[int]:
    """Watch a model, and then one of fewer parameters than servers; return who holds them."""
    del rank
    stride = evenstride.Stride(global_batch=8, sync="bsp-ps(servers=2)")
    stride.watch(net())
    stride.watch(nn.Linear(2, 1, bias=False))
    sync: Any = session(stride).sync
    places = list(sync._places.values())
    stride.close()
    return places


def two(rank: int) -> str:
    """Make two strides with servers and return the second one's refusal."""
    del rank
    first = evenstride.Stride(global_batch=8, sync="bsp-ps")
    first.watch(net())
    second = evenstride.Stride(global_batch=8, sync="asp")
    reported = ""
    try:
        second.watch(net())
    except evenstride.errors.EvenstrideError as error:
        reported = str(error)
    second.close()
    first.close()
    return reported


def broken(rank: int) -> str:
    """Ask for two servers, one by each rank, whose processes end at once."""
    del rank
    stride = evenstride.Stride(global_batch=8, sync="bsp-ps(servers=2)")
    whole = vars(server_calls)["start"]
    vars(server_calls)["start"] = _broken
    reported = ""
    try:
        stride.watch(net())
    except evenstride.errors.WorkerLost as error:
        reported = str(error)
    vars(server_calls)["start"] = whole
    stride.close()
    return reported


def _broken(meeting: RpcRendezvous, index: int) -> ServerProcess:
    del meeting, index
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    return ServerProcess(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))
