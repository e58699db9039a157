"""How many samples this rank may run at once, and whether all ranks run equally many batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evenstride.core.fleet import FloatArray, Shares
from evenstride.core.sampling.partition import (
    in_pieces,
    micro_batches,
    micro_batches_by_cost,
    step_shares,
    whole_micro_batches,
)
from evenstride.errors import ConfigError

# A batch that exceeds the largest one that fitted by more than `_BOLD` runs in a way that can be
# repeated. Only `_REST` of it then remains for the synchronising pass, which is almost sure to fit.
_BOLD, _REST = 1 / 8, 1 / 16

Spans = tuple[tuple[int, int], ...]
"""The smallest and the largest share that each rank may get in a step, in rank order."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What all ranks' training loaders asked for, and the shares that ranks may get."""

    spans: Spans = ()  # of the shares in full steps; empty with one process
    open: bool = False  # whether the global batch, and so all shares, may change.
    # Largest micro-batch of each rank, in samples or in cost; empty without a loader.
    asked: tuple[int | None, ...] = ()
    tail: int = 0  # samples of an epoch's last, short step over all ranks; 0 without one
    by_cost: bool = False  # whether the cost of micro-batches is limited on any rank

    @property
    def cuts(self) -> bool:
        """Whether any rank may split a share into micro-batches."""
        return any(size is not None for size in self.asked)

    def check_even(self) -> None:
        """Raise `ConfigError` if ranks may get shares that make unequal numbers of batches."""
        if len(self.spans) < 2 or not self.asked:
            return
        if self.open and self.cuts:
            raise ConfigError(
                "statistics over all ranks (sync_batch_norm) need the same number of micro-batches "
                'on each rank. With global_batch="auto" any share is possible. Leave '
                "max_micro_batch out, give global_batch a number, or use layers without "
                "statistics, such as group norm"
            )
        if self.by_cost:
            raise _by_cost()
        steps = [(self.spans, "a step")]
        if self.tail:
            steps.append((tail_spans(self.spans, self.tail), "the last, short step of an epoch"))
        for shares, when in steps:
            counts = [_counts(span, size) for span, size in zip(shares, self.asked, strict=True)]
            low, high = _apart(counts)
            if counts[low][0] != counts[high][1]:
                raise self._uneven(when, shares, low, high)

    def check_step(self, shares: Shares) -> None:
        """Raise `ConfigError` on every rank if these shares make unequal numbers of batches."""
        asked = self.asked or (None,) * len(shares)
        counts = [len(micro_batches(range(n), k)) for n, k in zip(shares, asked, strict=True)]
        if len(set(counts)) > 1:
            raise ConfigError(
                f"shares of {'/'.join(map(str, shares))} samples would be trained in "
                f"{'/'.join(map(str, counts))} micro-batches, but statistics over all ranks need "
                "the same number on each rank. Leave max_micro_batch out (Stride(max_share=...) "
                "keeps shares small), or use layers without statistics, such as group norm"
            )

    def _uneven(self, when: str, shares: Spans, low: int, high: int) -> ConfigError:
        def batches(rank: int, which: int) -> str:
            size = self.asked[rank]
            count = _counts(shares[rank], size)[which]
            limit = "no max_micro_batch" if size is None else f"max_micro_batch={size}"
            return f"{count} on rank {rank} ({shares[rank][which]} sample(s), {limit})"

        tail = "loader(drop_last=True) if it is just that step, " if when.startswith("the") else ""
        return ConfigError(
            f"statistics over all ranks (sync_batch_norm) need the same number of micro-batches on "
            f"each rank, but {when} may have {batches(low, 0)} and {batches(high, 1)}. Leave "
            "max_micro_batch out and keep shares small with Stride(max_share=...). Or use "
            f"{tail}equal shares (policy='uniform'), or layers without statistics, such as group "
            "norm"
        )


@dataclass(slots=True)
class MicroBatchLimits:
    """The sizes that a rank's batches may have: by the script's options and by its memory."""

    asked: int | None = None  # largest micro-batch that the script allows
    whole: bool = False  # whether all but one have exactly that size, instead of equal sizes.
    most_cost: float | None = None  # of a micro-batch, if samples have costs.
    pieces: int = 0  # micro-batches of every step on every rank; 0 if sizes decide
    learned: int | None = None  # most samples that may fit, after some did not
    repeated: int = 0  # number of batches that did not fit
    proven: int = 0  # samples of the largest batch that fitted, forward and backward.
    guarded: bool = False  # whether the loop can repeat a batch that does not fit
    plain_norms: bool = False  # whether some layers need several samples at once
    micro: bool = False  # whether any rank may split a share into micro-batches.
    revision: int = 0  # changes when something is learned, which makes older plans outdated
    layout: RankLayout = RankLayout()
    even: bool = False  # whether all ranks must run the same number of batches in a step

    @property
    def at_most(self) -> int | None:
        """The most samples of one batch; ``None`` for no limit."""
        return min((n for n in (self.asked, self.learned) if n is not None), default=None)

    def ask(self, size: int | None, *, by_cost: bool) -> None:
        """Limit this rank's micro-batches as the script wants, by samples or by cost."""
        self.asked = None if by_cost else size
        self.most_cost = size if by_cost else None

    def count(self, pieces: int | None) -> None:
        """Split every share into a given number of micro-batches; ``None`` for no given number."""
        self.pieces = pieces or 0
        self.micro = self.micro or self.pieces > 1

    def exceeded(self, fits: int) -> None:
        """Note that a batch did not fit into memory, and that ``fits`` samples may fit."""
        self.repeated += 1
        self.revision += 1
        self.micro = True
        self.learned = fits
        self.proven = min(self.proven, fits)

    def fitted(self, samples: int, *, warm: bool) -> None:
        """Note that a batch fitted that could have been repeated; it proves its size if warm."""
        self.revision += not self.guarded
        self.guarded = self.micro = True
        if warm:
            self.proven = max(self.proven, samples)

    def watch_norms(self, *, plain: bool) -> None:
        """Note whether the model has layers that need several samples at once."""
        self.plain_norms = plain

    def cut(self, *, micro: bool) -> None:
        """Note whether a share may be split into micro-batches."""
        self.micro = micro

    def lay_out(self, asked: Sequence[int | None], tail: int, *, by_cost: bool) -> None:
        """Note what all ranks' training loaders asked for; see `require_even`."""
        limited = by_cost and any(size is not None for size in asked)
        layout = replace(self.layout, asked=tuple(asked), tail=tail, by_cost=limited)
        if self.even:
            layout.check_even()
        self.layout = layout
        self.micro = layout.cuts

    def change_tail(self, tail: int) -> None:
        """Note how many samples the last, short step has, after a change of the global batch."""
        self.layout = replace(self.layout, tail=tail)

    def require_even(self) -> None:
        """Require from now on that all ranks run the same number of batches in every step.

        Raises `ConfigError` on every rank if some shares would be split into different numbers.
        Nothing was changed then.
        """
        self.layout.check_even()
        self.even = len(self.layout.spans) > 1

    def check(self, shares: Shares) -> None:
        """Raise `ConfigError` unless the ranks run the required numbers of batches in a step."""
        if self.even and self.most_cost is not None:
            raise _by_cost()
        if self.even:
            self.layout.check_step(shares)

    def parts_by_cost(self, positions: range, costs: FloatArray) -> tuple[range, ...]:
        """Split a share's positions into the batches to train, by cost."""
        if self.most_cost is None:
            return self.parts(positions)
        parts = micro_batches_by_cost(positions, costs, self.most_cost)
        return tuple(piece for part in parts for piece in micro_batches(part, self.learned))

    def parts(self, positions: range) -> tuple[range, ...]:
        """Split a share's positions into the batches to train.

        A backward pass that runs out of memory can be repeated only while nothing has been sent to
        other ranks. So the larger part of a new size runs first, with its synchronisation
        postponed, and a small rest synchronises.

        >>> MicroBatchLimits(asked=4).parts(range(6))
        (range(0, 3), range(3, 6))
        >>> MicroBatchLimits(asked=4, whole=True).parts(range(6))
        (range(0, 4), range(4, 6))
        >>> MicroBatchLimits(proven=32, guarded=True).parts(range(48))
        (range(0, 45), range(45, 48))
        """
        at_most = self.at_most
        if self.pieces:
            return in_pieces(positions, self.pieces)
        if self.whole and at_most is not None:
            parts = whole_micro_batches(positions, at_most)
        else:
            parts = micro_batches(positions, at_most)
        last = parts[-1]
        bold = self.guarded and not self.even and not self.plain_norms
        if not bold or len(last) < 2 or len(last) <= self.proven * (1 + _BOLD):
            return parts
        cut = last.stop - max(1, round(len(last) * _REST))
        return (*parts[:-1], range(last.start, cut), range(cut, last.stop))


def tail_spans(spans: Spans, tail: int) -> Spans:
    """Translate spans of full steps into those of an epoch's last, short step of ``tail`` samples.

    >>> tail_spans(((5, 5), (11, 11)), 8), tail_spans(((1, 15), (1, 15)), 8)
    (((3, 3), (5, 5)), ((1, 8), (1, 8)))
    """
    if all(least == most for least, most in spans):
        shares = step_shares(tuple(least for least, _ in spans), tail)
        return tuple((share, share) for share in shares)
    fewest = int(tail >= len(spans))
    return tuple((min(least, fewest), min(most, tail)) for least, most in spans)


def _apart(counts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return two ranks, one with fewer and one with more batches, if any two can differ."""
    ranks = range(len(counts))
    low = min(ranks, key=lambda rank: counts[rank][0])
    high = max(reversed(ranks), key=lambda rank: counts[rank][1])
    if low != high:
        return low, high
    other = int(low == 0)
    return (low, other) if counts[low][0] != counts[other][1] else (other, high)


def _counts(span: tuple[int, int], size: int | None) -> tuple[int, int]:
    least, most = (1 if size is None else max(-(-share // size), 1) for share in span)
    return least, most


def _by_cost() -> ConfigError:
    return ConfigError(
        "micro-batches by cost differ in number between ranks, but statistics over all ranks need "
        "the same number on each rank. Leave max_micro_batch out, or use layers without "
        "statistics, such as group norm"
    )
