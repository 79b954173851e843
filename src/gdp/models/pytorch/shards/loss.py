"""Cross entropy of classes that are cut over ranks: no rank has all scores of a token."""

# mypy: disable-error-code="no-any-return,no-untyped-call"

from typing import Any

import torch
from torch import Tensor

from gdp.models.pytorch.shards.collectives import ops

_MEAN, _SUM = 1, 2  # `reduction` of `cross_entropy_loss`


def parallel_cross_entropy(
    logits: Tensor, target: Tensor, num_classes: int, num_ranks: int, rank: int, reduction: int, ignored: int
) -> Tensor:
    """Returns the loss of tokens [n] by this rank's part of their logits, [n, classes of a rank]."""
    if any(torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")):  # as the whole step's is
        logits = logits.float()
    losses: Tensor = _Losses.apply(logits, target, num_classes, num_ranks, rank, ignored)
    if reduction == _MEAN:
        return losses.sum() / (target != ignored).sum()
    return losses.sum() if reduction == _SUM else losses


class _Losses(torch.autograd.Function):
    """The loss of each token; 0 for those that are ignored."""

    @staticmethod
    def forward(
        context: Any, logits: Tensor, target: Tensor, num_classes: int, num_ranks: int, rank: int, ignored: int
    ) -> Tensor:
        width = logits.shape[1]
        first = rank * width
        if num_ranks * width > num_classes:  # the filling; all ranks have the same ops
            logits = logits.masked_fill(torch.arange(first, first + width) >= num_classes, -torch.inf)
        largest = ops.all_reduce.max(logits.amax(1), num_ranks)
        shares = (logits - largest.unsqueeze(1)).exp_()
        total = ops.all_reduce(shares.sum(1), num_ranks)
        is_other = (target < first) | (target >= first + width)
        places = (target - first).masked_fill(is_other, 0)
        own = logits.gather(1, places.unsqueeze(1)).squeeze(1).masked_fill(is_other, 0)
        score = ops.all_reduce(own, num_ranks)
        is_ignored = target == ignored
        shares.div_(total.unsqueeze(1))
        context.save_for_backward(shares, places, is_other, is_ignored)
        return (total.log() + largest - score).masked_fill(is_ignored, 0)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shares, places, is_other, is_ignored = context.saved_tensors
        factor = gradient.masked_fill(is_ignored, 0)
        result = shares * factor.unsqueeze(1)
        result.scatter_add_(1, places.unsqueeze(1), factor.masked_fill(is_other, 0).neg().unsqueeze(1))
        return result, None, None, None, None, None
