"""Every element is written once, and all ranks write about the same amount."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstride.runtime.checkpoint.restore.saved_state import Sources
from evenstride.runtime.checkpoint.save.save_job import Staging, TensorBlock, lay_out, pieces_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6)


def _made(described: list[tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    return {
        str(n): (torch.arange(torch.Size(shape).numel()) % 2 + n).to(dtype).reshape(shape)
        for n, (shape, dtype) in enumerate(described)
    }


@given(shared=tensors, leader=tensors, world_size=st.integers(1, 5))
def test_every_element_is_written_once_and_as_it_was(
    shared: list[tuple[tuple[int, ...], torch.dtype]],
    leader: list[tuple[tuple[int, ...], torch.dtype]],
    world_size: int,
) -> None:
    mine, theirs = _made(shared), {f"l{key}": t for key, t in _made(leader).items()}
    both = mine | theirs
    count = {key: torch.zeros(tensor.shape, dtype=torch.int64) for key, tensor in both.items()}
    seen = set()

    for rank in range(world_size):
        staged = Staging().copy(pieces_of(Sources(mine, theirs), rank, world_size))
        for laid in staged.laid:
            at = tuple(slice(o, o + s) for o, s in zip(laid.offset, laid.sizes, strict=True))
            assert torch.equal(staged.view(laid), both[laid.key][at])
            assert laid.whole == both[laid.key].shape
            count[laid.key][at] += 1
            seen.add(laid.key)

    assert all(bool((each == 1).all()) for each in count.values())
    assert seen == both.keys()


@given(shared=tensors, world_size=st.integers(1, 5))
def test_parts_differ_by_less_than_two_rows(
    shared: list[tuple[tuple[int, ...], torch.dtype]], world_size: int
) -> None:
    made = _made(shared)
    row_bytes = max((t.nbytes // max(1, *t.shape, 1) * 25 for t in made.values()), default=0)

    parts = [
        sum(piece.data.nbytes for piece in pieces_of(Sources(made, {}), rank, world_size))
        for rank in range(world_size)
    ]

    assert max(parts) - min(parts) <= 2 * row_bytes


def test_a_large_tensor_is_split() -> None:
    made = {"a": torch.zeros(1, 4000, 3), "b": torch.zeros(5)}

    parts = [
        sum(piece.data.nbytes for piece in pieces_of(Sources(made, {}), rank, 4))
        for rank in range(4)
    ]

    assert max(parts) - min(parts) <= 24


def test_tensors_that_differ_between_ranks_are_saved_by_rank_0() -> None:
    sources = Sources({}, {"buffer": torch.ones(100)})

    assert [len(pieces_of(sources, rank, 3)) for rank in range(3)] == [1, 0, 0]


def test_a_copy_does_not_change_with_its_tensor() -> None:
    tensor = torch.ones(10)
    staged = Staging().copy(pieces_of(Sources({"t": tensor}, {}), 0, 1))

    tensor.zero_()

    assert torch.equal(staged.view(staged.laid[0]), torch.ones(10))
    assert b"".join(staged.chunks()) == torch.ones(10).numpy().tobytes()


def test_the_buffer_is_reused() -> None:
    staging = Staging()
    first = staging.copy(pieces_of(Sources({"t": torch.ones(1000)}, {}), 0, 1))
    address = first.buffer.data_ptr()

    second = staging.copy(pieces_of(Sources({"t": torch.zeros(900)}, {}), 0, 1))

    assert second.buffer.data_ptr() == address
    assert len(second.buffer) == 3600


class Runtime:
    """CUDA's functions that lock pages, of which some may not be locked."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.locked = error, dict[int, int]()

    def cudaHostRegister(self, address: int, size_bytes: int, _: int) -> int:
        if not self.error:
            self.locked[address] = size_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


class OnCuda(torch.Tensor):
    """A tensor that says it is on CUDA."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def _on_cuda(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> list[tuple[int, bool]]:
    """Let tensors of `OnCuda` be copied; return the sizes of buffers, and whether torch locks."""
    made: list[tuple[int, bool]] = []
    empty = torch.empty

    def like(other: torch.Tensor, *, pin_memory: bool) -> torch.Tensor:
        made.append((len(other), pin_memory))
        return empty(len(other), dtype=other.dtype)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "empty_like", like)
    passed = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: passed)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return made


def _pieces(floats: int) -> list[TensorBlock]:
    data = torch.ones(floats).as_subclass(OnCuda)
    return [TensorBlock("t", data, (0,), (floats,))]


def test_a_buffer_for_a_device_takes_no_more_than_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    by_torch = _on_cuda(monkeypatch, runtime)
    staging = Staging()
    first = staging.copy(_pieces(1000)).buffer.data_ptr()

    assert runtime.locked == {first: 4000}
    staging.copy(_pieces(900))
    assert runtime.locked == {first: 4000}, "it is reused"
    second = staging.copy(_pieces(3000)).buffer
    assert runtime.locked == {second.data_ptr(): 12000}
    staging.drop()
    assert runtime.locked == {}
    staging.copy(_pieces(10))
    assert len(runtime.locked) == 1
    del staging
    assert runtime.locked == {}, "before the memory is freed"
    assert by_torch == []


def test_a_buffer_whose_pages_cannot_be_locked_is_made_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_torch = _on_cuda(monkeypatch, Runtime(error=2))
    staging = Staging()

    staged = staging.copy(_pieces(1000))
    staging.drop()

    assert by_torch == [(4000, True)]
    assert torch.equal(staged.view(staged.laid[0]), torch.ones(1000))


@pytest.mark.gpu
def test_a_buffer_for_a_real_device_is_locked_and_right() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    staging = Staging()
    data = torch.rand(10_000_001, device="cuda")

    staged = staging.copy([TensorBlock("t", data, (0,), tuple(data.shape))])
    staged.wait()

    assert staged.buffer.is_pinned()
    assert torch.equal(staged.view(staged.laid[0]), data.cpu())
    staging.drop()


def test_pieces_are_aligned_for_every_dtype() -> None:
    sources = Sources({"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(2).double()}, {})

    laid, size_bytes = lay_out(pieces_of(sources, 0, 1))

    assert [each.start_bytes % 64 for each in laid] == [0, 0]
    assert size_bytes == 64 + 16


def test_ranks_with_different_tensors_have_different_outlines() -> None:
    a, b = {"x": torch.ones(2)}, {"x": torch.ones(3)}
    outlines = {
        Sources(a, {}).outline(),
        Sources(b, {}).outline(),
        Sources({"y": torch.ones(2)}, {}).outline(),
        Sources({"x": torch.ones(2).double()}, {}).outline(),
    }

    assert len(outlines) == 4
    assert Sources(a, {}).outline() == Sources({"x": torch.zeros(2)}, {}).outline()
