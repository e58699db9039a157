"""How many samples this rank may hold at once, and whether all ranks run equally many batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evenstride.core.fleet import FloatArray, Shares
from evenstride.core.sampling.partition import (
    micro_batches,
    micro_batches_by_cost,
    step_shares,
    whole_micro_batches,
)
from evenstride.errors import ConfigError

# A batch larger than any that went through by more than this part is tried in a way that can be
# repeated. What then remains for its synchronising pass is this part of it, and as good as safe.
_BOLD, _REST = 1 / 8, 1 / 16

Spans = tuple[tuple[int, int], ...]
"""The fewest and the most samples that each rank may get in a step, in rank order."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What all ranks have asked of the training loader, and the shares that they may get."""

    spans: Spans = ()  # of the shares in full steps; empty with one process
    open: bool = False  # whether the global batch may become another one, and all shares with it
    # Most samples of a micro-batch on each rank, or the most it may cost; empty without a loader.
    asked: tuple[int | None, ...] = ()
    tail: int = 0  # samples of an epoch's last, short step over all ranks; 0 if there is none
    by_cost: bool = False  # whether any rank has micro-batches of limited costs

    @property
    def cuts(self) -> bool:
        """Whether any rank may cut a share into micro-batches."""
        return any(size is not None for size in self.asked)

    def check_even(self) -> None:
        """Raise `ConfigError` if shares that ranks may get make unequal numbers of batches."""
        if len(self.spans) < 2 or not self.asked:
            return
        if self.open and self.cuts:
            raise ConfigError(
                "statistics over all ranks (sync_batch_norm) need the same number of micro-batches "
                'on each, and with global_batch="auto" shares may become any; leave '
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
        """Raise `ConfigError`, alike on every rank, if these shares make unequal numbers."""
        asked = self.asked or (None,) * len(shares)
        counts = [len(micro_batches(range(n), k)) for n, k in zip(shares, asked, strict=True)]
        if len(set(counts)) > 1:
            raise ConfigError(
                f"shares of {'/'.join(map(str, shares))} samples would be trained in "
                f"{'/'.join(map(str, counts))} micro-batches, and statistics over all ranks need "
                "the same number on each; leave max_micro_batch out (Stride(max_share=...) keeps "
                "shares small), or use layers without statistics, such as group norm"
            )

    def _uneven(self, when: str, shares: Spans, low: int, high: int) -> ConfigError:
        def told(rank: int, which: int) -> str:
            size = self.asked[rank]
            count = _counts(shares[rank], size)[which]
            limit = "no max_micro_batch" if size is None else f"max_micro_batch={size}"
            return f"{count} on rank {rank} ({shares[rank][which]} sample(s), {limit})"

        tail = "loader(drop_last=True) if it is just that step, " if when.startswith("the") else ""
        return ConfigError(
            f"statistics over all ranks (sync_batch_norm) need the same number of micro-batches on "
            f"each, and {when} may have {told(low, 0)} and {told(high, 1)}; leave max_micro_batch "
            f"out and keep shares small with Stride(max_share=...), or use {tail}equal shares "
            "(policy='uniform'), or layers without statistics, such as group norm"
        )


@dataclass(slots=True)
class MicroBatchLimits:
    """The sizes that a rank's batches may have: as asked for, and as its memory has shown."""

    asked: int | None = None  # most samples of a micro-batch, as the user wants it
    whole: bool = False  # micro-batches have that very size, and one rest, instead of equal sizes
    most_cost: float | None = None  # of a micro-batch, where samples have costs
    learned: int | None = None  # most samples that may fit, once some did not
    repeated: int = 0  # how often some did not
    proven: int = 0  # samples of the largest batch that went through, both ways
    guarded: bool = False  # whether the training loop can repeat a batch that does not fit
    plain_norms: bool = False  # whether the model has layers that need several samples at once
    micro: bool = False  # whether any rank may cut a share into micro-batches
    revision: int = 0  # counts what has been learned; plans made before are to be made again
    layout: RankLayout = RankLayout()
    even: bool = False  # whether all ranks must run the same number of batches in a step

    @property
    def at_most(self) -> int | None:
        """The most samples of one batch; ``None`` for no limit."""
        return min((n for n in (self.asked, self.learned) if n is not None), default=None)

    def ask(self, size: int | None, *, by_cost: bool) -> None:
        """Limit this rank's micro-batches as the user wants it, by samples or by cost."""
        self.asked = None if by_cost else size
        self.most_cost = size if by_cost else None

    def exceeded(self, fits: int) -> None:
        """Note that a batch did not fit into memory; at most ``fits`` samples may."""
        self.repeated += 1
        self.revision += 1
        self.micro = True
        self.learned = fits
        self.proven = min(self.proven, fits)

    def fitted(self, samples: int, *, warm: bool) -> None:
        """Note that a batch fitted that could have been repeated; cold, that proves nothing."""
        self.revision += not self.guarded
        self.guarded = self.micro = True
        if warm:
            self.proven = max(self.proven, samples)

    def watch_norms(self, *, plain: bool) -> None:
        """Note whether the model has layers that need several samples at once."""
        self.plain_norms = plain

    def cut(self, *, micro: bool) -> None:
        """Note whether a share may be cut into micro-batches."""
        self.micro = micro

    def lay_out(self, asked: Sequence[int | None], tail: int, *, by_cost: bool) -> None:
        """Note what all ranks have asked of the training loader; see `require_even`."""
        limited = by_cost and any(size is not None for size in asked)
        layout = replace(self.layout, asked=tuple(asked), tail=tail, by_cost=limited)
        if self.even:
            layout.check_even()
        self.layout = layout
        self.micro = layout.cuts

    def change_tail(self, tail: int) -> None:
        """Note how many samples the last, short step has, now that the batch is another."""
        self.layout = replace(self.layout, tail=tail)

    def require_even(self) -> None:
        """From now on, all ranks must run the same number of batches in every step.

        Raises `ConfigError`, alike on every rank, if some shares would be cut into other numbers;
        nothing was changed then.
        """
        self.layout.check_even()
        self.even = len(self.layout.spans) > 1

    def check(self, shares: Shares) -> None:
        """Raise `ConfigError` unless the ranks run as many batches as they must in a step."""
        if self.even and self.most_cost is not None:
            raise _by_cost()
        if self.even:
            self.layout.check_step(shares)

    def parts_by_cost(self, positions: range, costs: FloatArray) -> tuple[range, ...]:
        """Return a share's positions as the batches to train them in, by what they cost."""
        if self.most_cost is None:
            return self.parts(positions)
        parts = micro_batches_by_cost(positions, costs, self.most_cost)
        return tuple(piece for part in parts for piece in micro_batches(part, self.learned))

    def parts(self, positions: range) -> tuple[range, ...]:
        """Return a share's positions as the batches to train them in.

        A backward pass that runs out of memory can be repeated only while nothing has been sent to
        other ranks. So a size that has not been run is run first with its synchronisation held
        back, and a small rest synchronises.

        >>> MicroBatchLimits(asked=4).parts(range(6))
        (range(0, 3), range(3, 6))
        >>> MicroBatchLimits(asked=4, whole=True).parts(range(6))
        (range(0, 4), range(4, 6))
        >>> MicroBatchLimits(proven=32, guarded=True).parts(range(48))
        (range(0, 45), range(45, 48))
        """
        at_most = self.at_most
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
    """Return what spans mean for an epoch's last, short step of ``tail`` samples.

    >>> tail_spans(((5, 5), (11, 11)), 8), tail_spans(((1, 15), (1, 15)), 8)
    (((3, 3), (5, 5)), ((1, 8), (1, 8)))
    """
    if all(least == most for least, most in spans):
        shares = step_shares(tuple(least for least, _ in spans), tail)
        return tuple((share, share) for share in shares)
    fewest = int(tail >= len(spans))
    return tuple((min(least, fewest), min(most, tail)) for least, most in spans)


def _apart(counts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return two ranks, the one with fewer and the one with more, if any two can differ."""
    ranks = range(len(counts))
    low = min(ranks, key=lambda rank: counts[rank][0])
    high = max(reversed(ranks), key=lambda rank: counts[rank][1])
    if low != high:
        return low, high
    other = int(low == 0)
    return (low, other) if counts[low][0] != counts[other][1] else (other, high)


def _counts(span: tuple[int, int], size: int | None) -> tuple[int, int]:
    """Return the fewest and the most micro-batches that a share is trained in."""
    least, most = (1 if size is None else max(-(-share // size), 1) for share in span)
    return least, most


def _by_cost() -> ConfigError:
    return ConfigError(
        "micro-batches by cost differ in number between ranks, and statistics over all "
        "ranks need the same number on each; leave max_micro_batch out, or use layers "
        "without statistics, such as group norm"
    )
