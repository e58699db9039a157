"""Refuses models whose work on one sample is divided over several ranks.

That is tensor, sequence, context, expert and pipeline parallelism. Such ranks need the same
samples, but each rank of a `Stride` has samples of its own, in numbers that change.

Torch has no common sign of a divided model. Most kinds show at `Stride.watch`: in the parameters,
in the device meshes and process groups of the model, in hooks, or in a stage of a pipeline that
holds the model. A stage that is made later shows at the first batch (`check_stages`), and
``context_parallel`` shows where a loss is scaled inside it (`in_context_parallel`).
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from evenstride.errors import ConfigError

logger = logging.getLogger("evenstride")

# Usual names of mesh dimensions, and the kind of parallelism that they stand for.
_KINDS = {"tp": "tensor", "sp": "sequence", "cp": "context", "ep": "expert", "pp": "pipeline"}
# Parts of names of dimensions along which each rank has samples of its own.
_DATA = {"dp", "ddp", "fsdp", "hsdp", "data", "parallel", "replica", "replicate", "shard"}
# Marks of parameters that only some ranks share: of Megatron-LM and DeepSpeed, and of Tutel.
_EXPERT_MARKS = {"allreduce": False, "skip_allreduce": True}
_PIPELINING = "torch.distributed.pipelining"
_CONTEXT = "torch.distributed.tensor.experimental"
# `context_parallel` replaces this function for as long as it is active.
_ATTENTION = nn.functional.scaled_dot_product_attention


def check_divided(
    model: nn.Module, groups: Sequence[Any], engines: Sequence[Any], members: Sequence[int]
) -> None:
    """Raise a `ConfigError` if a model is divided along another dimension than its data.

    ``groups`` are the parameter groups of FSDP2 in the model, ``engines`` its DDP modules, and
    ``members`` the numbers of ranks that each of the groups averages over.
    """
    _check_parameters(model, groups)
    for part in model.modules():
        _check_module(part)
    for mesh in _meshes(groups, engines):
        # The model has one part of a larger mesh; along the rest, something else is divided.
        names = _others(mesh)
        if names:
            root = _root(mesh)
            dims = [f"{name}={_size(root, name)}" for name in names]
            raise _refused(
                _kind_of(*names),
                f"its device mesh {_shown(root)} has {', '.join(dims)} in addition to the "
                "dimensions that gradients are averaged over",
            )
    # Experts live on some of the ranks, so fewer gradients are averaged for them than for the rest.
    if len(set(members)) > 1:
        raise _refused(
            "expert parallelism",
            f"fully_shard averages some of its parameters over {min(members)} ranks, and others "
            f"over {max(members)}",
        )
    check_stages([model])


def check_stages(models: Sequence[nn.Module]) -> None:
    """Raise a `ConfigError` if a model is part of a stage of ``torch.distributed.pipelining``.

    Reads all objects of the process, which takes tens of milliseconds, if that module is imported.
    """
    if not models or _PIPELINING not in sys.modules:
        return
    ours = {id(part) for model in models for part in model.modules()}
    for stage in _objects_of(_PIPELINING):
        held = getattr(stage, "submod", None)
        if isinstance(held, nn.Module) and any(id(part) in ours for part in held.modules()):
            raise pipelined(stage)


def of_pipeline(thing: object) -> bool:
    """Return whether an object is a stage, a schedule or a model of torch's pipelining."""
    return _defined_in(type(thing), _PIPELINING)


def pipelined(thing: object) -> ConfigError:
    return _refused("pipeline parallelism", f"it is part of a pipeline ({type(thing).__name__})")


def in_context_parallel() -> bool:
    """Return whether ``context_parallel`` of torch has replaced the attention function."""
    attention = nn.functional.scaled_dot_product_attention
    if attention is _ATTENTION:
        return False
    module = str(getattr(attention, "__module__", ""))  # a user's own may have none
    return module.startswith(_CONTEXT)


def context_parallel() -> ConfigError:
    what = "scale() was called inside context_parallel()"
    return _refused("context parallelism", what, begin="the script trains with")


def check_other_dims(ranks: Sequence[int]) -> None:
    """Raise a `ConfigError` if ranks are one of several dimensions of some device mesh.

    ``ranks`` are those of a `Stride`, as global ranks. Reads all objects of the process.
    """
    if "torch.distributed.device_mesh" not in sys.modules:
        return
    for mesh in _objects_of("torch.distributed.device_mesh", "DeviceMesh"):
        others = _dims_besides(mesh, list(ranks))
        if others:
            names = mesh.mesh_dim_names or ()
            dims = [f"{names[at] if names else f'dimension {at}'}={mesh.size(at)}" for at in others]
            raise _refused(
                _kind_of(*(names[at] for at in others if names)),
                f"the Stride has the ranks of one dimension of the device mesh {_shown(mesh)}, "
                f"which also has {', '.join(dims)}",
                'or keep the batches alike along that dimension with policy="uniform"',
            )


def tell_of_the_rest(ranks: int, of: int) -> None:
    """Warn that a `Stride` changes the shares of only some ranks of the job."""
    if ranks < of:
        logger.warning(
            "this Stride changes the shares of %d of %d ranks. That is right if the others train "
            "something else. If they compute parts of the same samples (tensor, context or "
            'pipeline parallelism), their batches would differ from these: set policy="uniform"',
            ranks,
            of,
        )


def _refused(
    kind: str, what: str, way: str = "", begin: str = "watch() got a model with"
) -> ConfigError:
    return ConfigError(
        f"{begin} {kind}, which divides the work on one sample over several ranks: {what}. These "
        "ranks need the same samples, but evenstride gives each rank samples of its own; use "
        "DistributedDataParallel, fully_shard or HSDP alone" + (f", {way}" if way else "")
    )


def _check_parameters(model: nn.Module, groups: Sequence[Any]) -> None:
    sharded = [one for group in groups for one in group.fsdp_params]
    ours = {id(one.sharded_param) for one in sharded}
    divided = {id(one.sharded_param) for one in sharded if one.is_dtensor}  # before FSDP2
    for name, parameter in model.named_parameters():
        alone = id(parameter) not in ours and hasattr(parameter, "placements")
        if alone or id(parameter) in divided:
            mesh = getattr(parameter, "device_mesh")  # noqa: B009
            kind = _kind_of(*(mesh.mesh_dim_names or ()))
            raise _refused(kind, f"parameter {name} is a DTensor on {_shown(mesh)}")
        for mark, value in _EXPERT_MARKS.items():
            if getattr(parameter, mark, not value) is value:
                raise _refused(
                    "expert parallelism", f"parameter {name} has the mark {mark}={value}"
                )


def _check_module(part: nn.Module) -> None:
    if of_pipeline(part):
        raise pipelined(part)
    if any(map(_of_context, _hooks(part))):
        raise _refused("context parallelism", f"a hook of its {type(part).__name__} divides it")
    # Layers of Megatron-LM and others keep the process group of their parallelism.
    for name, value in vars(part).items():
        kind = _kind_of_attribute(name)
        if kind and isinstance(value, dist.ProcessGroup) and value.size() > 1:
            raise _refused(kind, f"its {type(part).__name__} has {name} ({value.size()} ranks)")


def _kind_of_attribute(name: str) -> str:
    """Return the parallelism that an attribute's name stands for, such as ``cp_group``."""
    stem, found, _ = name.lstrip("_").partition("_group")
    stem = stem.removesuffix("_parallel").removesuffix("_model")
    known = found and stem in (*_KINDS, *_KINDS.values())
    return f"{_KINDS.get(stem, stem)} parallelism" if known else ""


def _hooks(part: nn.Module) -> Iterator[Any]:
    yield from part._forward_pre_hooks.values()
    yield from part._forward_hooks.values()


def _of_context(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_CONTEXT)


def _meshes(groups: Sequence[Any], engines: Sequence[Any]) -> Iterator[Any]:
    for group in groups:
        yield group.mesh_info.mesh
    for engine in engines:
        mesh = getattr(engine, "device_mesh", None)
        if mesh is not None:
            yield mesh


def _others(mesh: Any) -> list[str]:
    """Return the names of the whole mesh's dimensions that may not divide the data."""
    root = _root(mesh)
    names, mine = root.mesh_dim_names or (), mesh.mesh_dim_names or ()
    if mesh.size() < root.size():
        found = [name for name in names if name not in mine]
    else:  # maybe a flattened mesh, which only a name can show
        found = [name for name in names if name in _KINDS and name not in mine]
    return [name for name in found if _size(root, name) > 1 and not _of_data(name)]


def _of_data(name: str) -> bool:
    """Return whether a dimension's name says that it divides data, such as ``dp_replicate``."""
    return set(name.split("_")) <= _DATA


def _size(root: Any, name: str) -> int:
    return int(root.size(root.mesh_dim_names.index(name)))


def _root(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh  # before torch 2.9

    resources: Any = device_mesh._mesh_resources
    return resources.get_root_mesh(mesh)


def _dims_besides(mesh: Any, ranks: list[int]) -> list[int]:
    """Return a mesh's other dimensions, if ``ranks`` are one line of it.

    Without those of size 1, and those whose names say that they divide data.
    """
    layout, own = mesh.mesh, dist.get_rank()
    place = (layout == own).nonzero().flatten().tolist()
    if mesh.ndim < 2 or not place:
        return []
    # Along each dimension, compare the line of the mesh that goes through this rank.
    for dim in range(mesh.ndim):
        line = layout[tuple(slice(None) if at == dim else p for at, p in enumerate(place))]
        if sorted(line.tolist()) == sorted(ranks):
            names = mesh.mesh_dim_names or [""] * mesh.ndim
            others = [at for at in range(mesh.ndim) if at != dim and mesh.size(at) > 1]
            return [at for at in others if not _of_data(names[at])]
    return []


def _kind_of(*dims: str) -> str:
    """Return the parallelism that names of mesh dimensions stand for."""
    found = [_KINDS.get(dim, dim) for dim in dims if dim in (*_KINDS, *_KINDS.values())]
    if found:
        return f"{' and '.join(dict.fromkeys(found))} parallelism"
    return "tensor, context, expert or pipeline parallelism"


def _shown(mesh: Any) -> str:
    names = mesh.mesh_dim_names or tuple(str(place) for place in range(mesh.ndim))
    return "(" + ", ".join(f"{name}={mesh.size(at)}" for at, name in enumerate(names)) + ")"


def _objects_of(module: str, name: str = "") -> Iterable[Any]:
    """Return all objects whose class, or a base of it, is of a module and has a name, if given."""
    # There are few types and many objects, so the types are checked first.
    objects = gc.get_objects()
    # By id, because a class cannot be hashed if its metaclass defines only equality.
    kinds = {id(type(one)): type(one) for one in objects}
    found = {key for key, kind in kinds.items() if _defined_in(kind, module, name)}
    return [one for one in objects if id(type(one)) in found]


def _defined_in(kind: type, module: str, name: str = "") -> bool:
    return any(
        str(getattr(base, "__module__", "")).startswith(module) and name in ("", base.__name__)
        for base in kind.__mro__
    )
