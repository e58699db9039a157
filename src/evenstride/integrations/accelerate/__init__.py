"""`EvenAccelerator` in place of Hugging Face Accelerate's `Accelerator`, in an unchanged script.

Every process gets as many batches as with Accelerate, but of its own size: the batches of an update
are parts of one global batch. So counters of batches, `len(loader)`, progress bars and collectives
in the loop stay right. Micro-batches of one size, in different numbers, would not allow that.

Accelerate wraps the model, places tensors, and handles precision, saving and trackers. This module
replaces what assumes equal batches: the loaders, the weight of a loss, the pace of schedulers, and
the gathering of metrics. See docs/how-to/accelerate.md.
"""

from __future__ import annotations

from evenstride.integrations.accelerate.even_accelerator import EvenAccelerator

__all__ = ["EvenAccelerator"]
