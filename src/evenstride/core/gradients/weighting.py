"""The weight of a worker's loss, which makes the average the exact mean over all samples."""

from __future__ import annotations


def loss_factor(world_size: int, local_weight: float, global_weight: float) -> float:
    """Return the factor that turns a mean of means into the global mean.

    Every engine that averages gradients over ``W`` ranks computes ``sum_k g_k / W``, with
    ``g_k`` the gradient of the rank's mean loss. Scaling each loss by ``W * n_k / N`` makes
    that ``sum_k (n_k / N) g_k``, which is the gradient of the mean over the union batch.

    ``n_k`` are the samples (or tokens) over which this loss is the mean; for a micro-batch its own,
    not its worker's. ``N`` is the sum over all ranks and micro-batches of the step. If the
    weight is 0, the factor is 0, even if the whole step has weight 0.

    Source:
        Dynamic Batching (Tyagi & Sharma, ACSOS 2020, arXiv 2305.12213, eq. 3) weights with
        ``lambda_k = b_k / sum b``. The paper's text has a further ``1 / K`` on weights
        that already sum to 1; we leave it out, as its successor's code does.

    >>> loss_factor(2, 3, 12), loss_factor(2, 9, 12), loss_factor(4, 0, 12)
    (0.5, 1.5, 0.0)
    """
    # Before the division, because a whole step may have weight 0.
    if local_weight == 0:
        return 0.0
    return world_size * local_weight / global_weight
