"""Refuse models whose work on one sample is divided over several ranks.

Tensor, context, expert and pipeline parallelism let several ranks compute parts of the same
samples. These ranks need batches of one size, and the same samples. Each rank of a `Stride` has
samples of its own, and their number moves, so the ranks' collectives would no longer fit together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from evenstride.errors import ConfigError

logger = logging.getLogger("evenstride")

_PARTS = ("tp", "sp", "cp", "ep", "pp")  # usual names: tensor, sequence, context, ...


def check_meshes(model: nn.Module, groups: Sequence[Any], engines: Sequence[Any]) -> None:
    """Refuse a model that is divided along another dimension than that of its data.

    Args:
        model: as it is trained.
        groups: FSDP2's groups of parameters in it.
        engines: the `DistributedDataParallel` modules in it.

    Raises:
        ConfigError: some parameter or device mesh shows tensor, context, expert or pipeline
            parallelism.
    """
    ours = {id(one.sharded_param) for group in groups for one in group.fsdp_params}
    divided = {id(p) for group in groups for p in _divided(group)}
    for name, parameter in model.named_parameters():
        alone = id(parameter) not in ours and hasattr(parameter, "placements")
        if alone or id(parameter) in divided:
            mesh = getattr(parameter, "device_mesh")  # noqa: B009
            raise _refused(f"parameter {name} is a DTensor on {_shown(mesh)}")
    for mesh in _meshes(groups, engines):
        dims = _others(mesh)
        if dims:
            root = _root(mesh)
            raise _refused(
                f"its device mesh {_shown(root)} has {', '.join(dims)} in addition to the "
                "dimensions that gradients are averaged over"
            )


def tell_of_the_rest(ranks: int, of: int) -> None:
    """Warn that a `Stride` moves the shares of some ranks of the job, whatever the others do."""
    if ranks < of:
        logger.warning(
            "this Stride moves the shares of %d of %d ranks. That is right if the others train "
            "something else. If they compute parts of the same samples (tensor, context or "
            'pipeline parallelism), their batches would differ from these: set policy="uniform"',
            ranks,
            of,
        )


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"watch() got a model that divides the work on one sample over several ranks: {what}. "
        "Tensor, context, expert and pipeline parallelism need the same samples on these ranks, "
        "and evenstride gives each rank samples of its own; use DistributedDataParallel, "
        "fully_shard or HSDP alone"
    )


def _divided(group: Any) -> Iterator[Any]:
    """Yield the parameters that were divided before FSDP2 sharded them."""
    return (one.sharded_param for one in group.fsdp_params if one.is_dtensor)


def _meshes(groups: Sequence[Any], engines: Sequence[Any]) -> Iterator[Any]:
    """Yield the meshes that gradients are averaged over."""
    for group in groups:
        yield group.mesh_info.mesh
    for engine in engines:
        mesh = getattr(engine, "device_mesh", None)
        if mesh is not None:
            yield mesh


def _others(mesh: Any) -> list[str]:
    """Return the dimensions of the whole mesh that do not divide the data, as text."""
    root = _root(mesh)
    names, mine = root.mesh_dim_names or (), mesh.mesh_dim_names or ()
    sizes = {name: root.size(place) for place, name in enumerate(names)}
    if mesh.size() < root.size():
        found = [name for name in names if name not in mine]
    else:  # flattened, maybe: then only a name can tell
        found = [name for name in names if name in _PARTS and name not in mine]
    return [f"{name}={sizes[name]}" for name in found if sizes[name] > 1]


def _root(mesh: Any) -> Any:
    """Return the mesh that a mesh was cut from."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh  # before torch 2.9

    resources: Any = device_mesh._mesh_resources
    return resources.get_root_mesh(mesh)


def _shown(mesh: Any) -> str:
    names = mesh.mesh_dim_names or tuple(str(place) for place in range(mesh.ndim))
    return "(" + ", ".join(f"{name}={mesh.size(at)}" for at, name in enumerate(names)) + ")"
