"""Streaming data sets of other libraries, by shards, so that a rank reads its own shards only.

A data set that is passed to `Stride.loader` as it is, or as a `Stream`, is read as a whole by every
rank. See docs/how-to/streaming-data.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from evenstride.errors import ConfigError
from evenstride.integrations.versions import warn_if_untested
from evenstride.runtime.loading.shards import Shards
from evenstride.runtime.loading.whole_reading import whole_stream

__all__ = ["huggingface_shards", "mosaic_shards", "webdataset_shards"]


def huggingface_shards(dataset: Any, lengths: Iterable[int] | None = None) -> Shards:
    """Return the shards of a streaming data set of Hugging Face's ``datasets``.

    The order of the shards is that of `Stride.loader`, so leave ``dataset.shuffle`` out. What
    ``dataset.map`` does is done by the rank that trains a sample.

    Args:
        dataset: A `datasets.IterableDataset` with several shards, as ``num_shards`` says.
        lengths: Number of samples in each shard; ``None`` to count them, on every rank.

    Raises:
        ConfigError: The data set is of another kind, or was split by rank, or the number of lengths
            is not that of the shards.

    Cost:
        Counting reads the whole data set once.
    """
    if not all(hasattr(dataset, name) for name in ("num_shards", "shard", "skip")):
        raise ConfigError(
            f"{type(dataset).__name__} has no shards to read; pass a datasets.IterableDataset "
            "(load_dataset(..., streaming=True), or to_iterable_dataset(num_shards=8))"
        )
    if getattr(dataset, "_distributed", None) is not None:
        raise ConfigError(
            "the data set was split by split_dataset_by_node(), and the loader would split it "
            "again; pass the data set without this split"
        )
    warn_if_untested("datasets", "5.2", "5.2")
    count = dataset.num_shards

    def read(shard: int, skip: int) -> Iterable[Any]:
        samples: Iterable[Any] = dataset.shard(count, shard).skip(skip)
        return samples

    return _shards(count, read, lengths)


def webdataset_shards(
    urls: str | Iterable[str],
    prepare: Callable[[Any], Iterable[Any]],
    lengths: Iterable[int] | None = None,
) -> Shards:
    """Return the tar files of a WebDataset as shards.

    Args:
        urls: The files, as a list or as ``webdataset`` expands it: ``train-{0000..0099}.tar``.
        prepare: Called with the `webdataset.WebDataset` of one file; returns the pipeline of its
            samples, such as ``lambda data: data.decode("torchrgb").to_tuple("jpg", "cls")``. It
            must keep the number of samples.
        lengths: Number of samples in each file; ``None`` to count them, on every rank.

    Raises:
        ConfigError: The number of lengths is not that of the files.
        ImportError: ``webdataset`` is missing.

    Cost:
        Counting reads every file once, without ``prepare``.
    """
    import webdataset

    warn_if_untested("webdataset", "1.0", "1.0")
    expand = webdataset.shardlists.expand_urls
    files: list[str] = expand(urls) if isinstance(urls, str) else list(urls)

    def of_file(shard: int) -> Any:
        # Splitters would leave the file to one rank and one loader process.
        return webdataset.WebDataset(
            [files[shard]], shardshuffle=False, nodesplitter=None, workersplitter=None
        )

    def read(shard: int, skip: int) -> Iterator[Any]:
        return islice(iter(prepare(of_file(shard))), skip, None)

    def raw(shard: int, _: int) -> Iterable[Any]:
        samples: Iterable[Any] = of_file(shard)
        return samples

    return _shards(len(files), read, lengths, raw)


def mosaic_shards(dataset: Any) -> Shards:
    """Return the shards of a `streaming.StreamingDataset` of MosaicML.

    Shards are downloaded when they are read, by the ranks of the machine that read them. Its own
    order (``shuffle``, ``batch_size``, ``num_canonical_nodes``) is not used. Proportions of
    several streams (``proportion``, ``repeat``, ``choose``) are not used either.

    Raises:
        ConfigError: The data set is of another kind.
    """
    if not all(hasattr(dataset, name) for name in ("samples_per_shard", "get_item")):
        raise ConfigError(
            f"{type(dataset).__name__} has no shards to read; pass a streaming.StreamingDataset"
        )
    warn_if_untested("mosaicml-streaming", "0.13", "0.13")
    lengths: list[int] = dataset.samples_per_shard.tolist()

    def read(shard: int, skip: int) -> Iterator[Any]:
        first = sum(lengths[:shard])
        return (dataset[index] for index in range(first + skip, first + lengths[shard]))

    return Shards(lengths, read)


def _shards(
    count: int,
    read: Callable[[int, int], Iterable[Any]],
    lengths: Iterable[int] | None,
    raw: Callable[[int, int], Iterable[Any]] | None = None,
) -> Shards:
    if lengths is None:
        with whole_stream():
            return Shards([sum(1 for _ in (raw or read)(shard, 0)) for shard in range(count)], read)
    known = list(lengths)
    if len(known) != count:
        raise ConfigError(
            f"{len(known)} lengths were given for {count} shards; give one number of samples per "
            "shard, in their order, or leave them out to have the samples counted"
        )
    return Shards(known, read)
