"""Batch norm over ranks: merging, converting, copying, and what one process sees of it."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from evenstride.errors import ConfigError
from evenstride.runtime.batch_norm.norm_layers import UnionBatchNorm, batch_norms, convert, merged
from tests.messages import raises_message

SHAPES: dict[type[nn.Module], list[tuple[int, ...]]] = {
    nn.BatchNorm1d: [(5, 3), (5, 3, 4)],
    nn.BatchNorm2d: [(5, 3, 2, 4)],
    nn.BatchNorm3d: [(5, 3, 2, 4, 2)],
}
KINDS = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
]


class Alone:
    """The context of one process."""

    group, counts = None, True

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __reduce__(self) -> Any:
        raise TypeError("a context can be neither copied nor pickled")


def row(values: np.ndarray[Any, np.dtype[np.float64]]) -> Tensor:
    """Return what a rank with these (samples, channels) sends."""
    if not len(values):
        return torch.zeros(2 * values.shape[1] + 1, dtype=torch.float64)
    mean = values.mean(axis=0)
    squares = ((values - mean) ** 2).sum(axis=0)
    return torch.from_numpy(np.concatenate([[len(values)], mean, squares]))


@given(
    shares=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    seed=st.integers(0, 999),
    offset=st.sampled_from([0.0, 1.0, 1e7]),
)
def test_any_split_merges_into_the_statistics_of_the_union(
    shares: list[int], seed: int, offset: float
) -> None:
    union = np.random.default_rng(seed).normal(offset, 1.0, (sum(shares), 3))
    union += np.arange(sum(shares))[:, None]
    pieces = np.split(union, np.cumsum(shares)[:-1])

    actual = merged(torch.stack([row(piece) for piece in pieces])).numpy()

    # Sums of squares would be wrong by 1e14 * 2**-53, one part in a hundred.
    np.testing.assert_allclose(actual, row(union).numpy(), rtol=1e-8, atol=1e-12)
    assert actual[0] == sum(shares)


def test_what_does_not_count_changes_no_bit() -> None:
    rows = torch.stack([row(np.random.default_rng(k).normal(k, 1, (k + 2, 4))) for k in range(3)])
    nothing = torch.zeros_like(rows[0])

    together = merged(torch.stack([rows[0], nothing, nothing, rows[1], nothing, rows[2]]))

    assert torch.equal(
        merged(torch.stack([rows[0], nothing])), merged(torch.stack([nothing, rows[0]]))
    )
    assert torch.equal(together, merged(torch.stack([rows[0], rows[1], rows[2]])))


def twins(kind: Callable[..., nn.Module], **settings: Any) -> tuple[nn.Module, nn.Module]:
    """Return one of torch's layers and the same one converted."""
    plain = kind(3, **settings).double()
    for parameter in plain.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return plain, convert(copy.deepcopy(plain), Alone())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_on_one_process_it_is_torchs_batch_norm(
    kind: type[nn.Module], shape: tuple[int, ...], settings: dict[str, Any]
) -> None:
    plain, union = twins(kind, **settings)

    for training in (True, True, False):
        inputs = [torch.randn(shape, dtype=torch.float64)] * 2
        leaves = [x.clone().requires_grad_() for x in inputs]
        for layer, leaf in zip((plain, union), leaves, strict=True):
            layer.train(training)(leaf).cos().sum().backward()
        assert torch.equal(*[leaf.grad for leaf in leaves])  # type: ignore[arg-type]

    assert plain.state_dict().keys() == union.state_dict().keys()
    for one, other in zip(plain.state_dict().values(), union.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for mine, yours in zip(plain.parameters(), union.parameters(), strict=True):
        assert torch.equal(mine.grad, yours.grad)  # type: ignore[arg-type]


def test_conversion_keeps_all_but_the_class() -> None:
    shared, again = nn.BatchNorm2d(3), nn.Sequential()
    again.append(shared)
    model = nn.Sequential(nn.BatchNorm1d(3), shared, again, nn.BatchNorm3d(3), nn.SyncBatchNorm(3))
    model[0].eval()
    vars(model[0])["qconfig"] = "a quantisation"
    seen: list[object] = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    before, state = list(model.parameters()), model.state_dict()

    converted = convert(model, Alone())

    assert converted is model
    layers = [m for m in model.modules() if isinstance(m, UnionBatchNorm)]
    assert len(layers) == 4
    assert not batch_norms(model)
    assert model[1] is again[0] is shared
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]
    assert model.state_dict().keys() == state.keys()
    assert [layer.training for layer in layers] == [False, True, True, True]
    assert model[0].qconfig == "a quantisation"
    model[1](torch.randn(2, 3, 4, 4))
    assert seen == [1]
    assert not hasattr(model[4], "process_group")  # it cannot be pickled


def test_a_module_that_is_a_batch_norm_is_converted_itself() -> None:
    layer = nn.BatchNorm1d(3)

    assert isinstance(convert(layer, Alone()), UnionBatchNorm)
    assert repr(layer).startswith("UnionBatchNorm(3, eps=1e-05, momentum=0.1")


def test_only_batch_norms_that_stand_alone_are_listed() -> None:
    group, instance, plain = nn.GroupNorm(1, 2), nn.InstanceNorm1d(2), nn.BatchNorm1d(2)
    without = UnionBatchNorm(2)
    model = nn.Sequential(
        group,
        instance,
        plain,
        plain,
        without,
        nn.SyncBatchNorm(2),
        UnionBatchNorm(2, context=Alone()),
    )

    assert batch_norms(model) == [plain, without]


class Activated(nn.BatchNorm1d):
    """A batch norm that does more."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input).relu()


def _patched() -> nn.Module:
    layer = nn.BatchNorm1d(2)
    layer.forward = torch.relu  # type: ignore[method-assign]
    return layer


def _parametrized() -> nn.Module:
    return parametrize.register_parametrization(nn.BatchNorm1d(2), "weight", nn.Tanh())


@pytest.mark.parametrize(
    "kind", [nn.LazyBatchNorm2d, lambda: Activated(2), _patched, _parametrized]
)
def test_a_layer_that_would_lose_something_is_refused_and_nothing_changes(
    kind: Callable[[], nn.Module],
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(kind()))
    classes = [type(layer) for layer in model.modules()]

    with raises_message(ConfigError, "1.0"):
        convert(model, Alone())

    assert [type(layer) for layer in model.modules()] == classes


def test_instance_norm_and_lazy_instance_norm_stay() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(2), nn.LazyInstanceNorm1d())

    convert(model, Alone())

    assert [type(layer) for layer in model] == [nn.InstanceNorm1d, nn.LazyInstanceNorm1d]


def test_a_copy_keeps_the_context_and_a_pickle_leaves_it_behind() -> None:
    context = Alone()
    model = convert(nn.Sequential(nn.BatchNorm1d(3)), context)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)

    twin = copy.deepcopy(model)
    loaded = [torch.load(saved, weights_only=False), pickle.loads(pickle.dumps(model))]

    assert not batch_norms(twin)
    assert next(twin.parameters()) is not next(model.parameters())
    x = torch.randn(4, 3)
    for other in loaded:
        assert batch_norms(other) == [other[0]]
        assert torch.equal(other(x), nn.BatchNorm1d(3)(x))
        assert not batch_norms(convert(other, context))


def test_a_state_dict_fits_both_ways() -> None:
    plain, union = twins(nn.BatchNorm2d)
    union(torch.randn(4, 3, 2, 2, dtype=torch.float64))

    plain.load_state_dict(union.state_dict())
    other = UnionBatchNorm(3).double()
    other.load_state_dict(plain.state_dict())

    for one, another in zip(union.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, another)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputing_leaves_running_statistics_alone(reentrant: bool) -> None:
    plain, union = twins(nn.BatchNorm1d)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    for _ in range(2):
        plain(x).square().sum().backward()
        checkpoint(union, x, use_reentrant=reentrant).square().sum().backward()

    for one, other in zip(plain.state_dict().values(), union.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_one_value_per_channel_is_refused_in_training_only() -> None:
    layer = UnionBatchNorm(3)
    before = copy.deepcopy(layer.state_dict())

    with raises_message(ConfigError, "drop_last"):
        layer(torch.randn(1, 3))

    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    layer.eval()(torch.randn(1, 3))


@pytest.mark.parametrize("shape", [(3,), (4, 2), (4, 2, 3)])
def test_an_input_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with raises_message(ConfigError):
        UnionBatchNorm(3)(torch.randn(shape))


def test_a_compiled_model_leaves_it_to_python() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    layer, x = UnionBatchNorm(3, context=Alone()), torch.randn(4, 3)

    def model(x: Tensor) -> Tensor:
        return layer(x.cos()).sin()  # type: ignore[no-any-return]

    torch.compiler.reset()

    with torch.no_grad():
        expected = model(x)
        assert torch.equal(torch.compile(model, backend=backend)(x), expected)

    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert [name for name in called if name in ("cos", "sin")] == ["cos", "sin"]
    assert not [name for name in called if "norm" in name]
