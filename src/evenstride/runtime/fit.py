"""How many samples this rank may hold at once: as asked for, and as its memory has shown."""

from __future__ import annotations

from dataclasses import dataclass

from evenstride.core.fleet import FloatArray, Shares
from evenstride.core.partition import (
    micro_batches,
    micro_batches_by_cost,
    whole_micro_batches,
)
from evenstride.errors import ConfigError

# A batch larger than any that went through by more than this part is tried in a way that can be
# repeated. What then remains for its synchronising pass is this part of it, and as good as safe.
_BOLD, _REST = 1 / 8, 1 / 16


@dataclass(slots=True)
class Fit:
    """The sizes that a rank's batches may have.

    Args:
        asked: most samples of a micro-batch, as the user wants it; ``None`` for no limit.
        learned: most samples that may fit, once some did not; ``None`` until then.
        repeated: how often some did not.
        proven: samples of the largest batch that went through, both ways.
        guarded: whether the training loop can repeat a batch that does not fit.
        everywhere: what each rank has asked for, in rank order.
        whole: whether micro-batches have the very size asked for, and one rest, not equal sizes.
        most_cost: the most that a micro-batch may cost, where samples have costs.
        revision: counts what has been learned; plans made before are to be made again.
        plain_norms: whether the model has layers that need several samples at once.
        even: whether all ranks must run the same number of batches in a step.
    """

    asked: int | None = None
    learned: int | None = None
    repeated: int = 0
    proven: int = 0
    guarded: bool = False
    everywhere: tuple[int | None, ...] = ()
    whole: bool = False
    most_cost: float | None = None
    revision: int = 0
    plain_norms: bool = False
    even: bool = False

    @property
    def at_most(self) -> int | None:
        """The most samples of one batch."""
        if self.asked is None or self.learned is None:
            return self.learned if self.asked is None else self.asked
        return min(self.asked, self.learned)

    def check(self, shares: Shares) -> None:
        """Raise unless the ranks run as many batches as they must, in a step with these shares.

        Raises:
            ConfigError: numbers differ; alike on every rank.
        """
        if not self.even:
            return
        if self.most_cost is not None:
            raise ConfigError(
                "micro-batches by cost differ in number between ranks, and statistics over all "
                "ranks need the same number on each; leave max_micro_batch out, or use layers "
                "without statistics, such as group norm"
            )
        asked = self.everywhere or (None,) * len(shares)
        counts = [len(micro_batches(range(n), k)) for n, k in zip(shares, asked, strict=True)]
        if len(set(counts)) > 1:
            raise ConfigError(
                f"shares of {'/'.join(map(str, shares))} samples would be trained in "
                f"{'/'.join(map(str, counts))} micro-batches, and statistics over all ranks need "
                "the same number on each; leave max_micro_batch out (Stride(max_share=...) keeps "
                "shares small), or use layers without statistics, such as group norm"
            )

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

        >>> Fit(asked=4).parts(range(6))
        (range(0, 3), range(3, 6))
        >>> Fit(asked=4, whole=True).parts(range(6))
        (range(0, 4), range(4, 6))
        >>> Fit(proven=32, guarded=True).parts(range(48))
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
