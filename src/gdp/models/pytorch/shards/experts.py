"""Mixtures of experts on the ranks of a group: each token goes to a few of many matrices.

    columns of all experts on each rank    each rank computes with the rows of all tokens; partial sums
    some experts on each rank, or columns of them on several
      tokens are cut                       rows go to the ranks of their experts, and their results back: all-to-all;
                                           between, ranks with columns of the same experts gather them, and scatter sums
      tokens are whole                     each rank computes with the rows of its experts; partial sums

Captures know no content. Each rank is taken to have as many rows as the others: balanced routing."""

# mypy: disable-error-code="no-any-return,no-untyped-call"

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from gdp.errors import InputError
from gdp.models.pytorch.shards.collectives import Among, Gather, Scatter, Shuffle
from gdp.models.pytorch.shards.cuts import PARTIAL, SEQUENCE, AxisCut, cut_of, cuts_by, mark
from gdp.models.pytorch.shards.exchanges import RankExchanges, current_run
from gdp.models.pytorch.shards.local_run import LocalRun


def experts_in(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules with weights [experts, .., ..] that take tokens, the experts of each, and scales."""
    return {
        path: module
        for path, module in model.named_modules()
        if any(weight.dim() == 3 for weight in module.parameters(recurse=False))
        and hasattr(module, "num_experts")
        and len(inspect.signature(type(module).forward).parameters) == 4  # with self
    }


def expert_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights whose first dimension is experts, by path."""
    return {
        f"{path}.{key}": weight
        for path, module in experts_in(model).items()
        for key, weight in module.named_parameters(recurse=False)
        if len(weight) == module.num_experts
    }


def run_experts_locally(model: nn.Module, num_parts: int) -> None:
    """Has experts, of which each rank has one of `num_parts` parts, compute with the rows of a rank, in place."""
    for module in experts_in(model).values():
        if not hasattr(module, "num_expert_parts"):
            module.num_expert_parts = num_parts  # type: ignore[assignment]
            kind: Any = type(module)
            names = {"forward": _forward_of(kind), "__module__": kind.__module__}
            module.__class__ = type(kind.__name__, (kind,), names)


def _forward_of(kind: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        run = current_run()
        if run is None:
            return kind.forward(self, *args, **kwargs)
        hidden, index, weights = (*args, *kwargs.values())
        if run.context and not run.has_experts:
            return _of_own_tokens(run, self, hidden, index, weights)
        if self.num_expert_parts == 1:
            with run.off():
                hidden, weights, index = run.for_cut_work(hidden), run.for_cut_work(weights), run.whole(index)
            return kind.forward(self, hidden, index, weights)
        return _whole_experts(run, self, kind.forward, hidden, index, weights)

    forward.__wrapped__ = kind.forward  # type: ignore[attr-defined]
    return forward


def _of_own_tokens(run: RankExchanges, module: nn.Module, *inputs: Tensor) -> Tensor:
    """Computes with the rows of this rank's tokens; all rows if they are not cut alike."""
    with cuts_by(run.attribute):
        lead, others = cut_of(inputs[0]), [cut_of(each) for each in inputs[1:]]
        if lead is None or any(cut is None or (cut.dim, cut.outer) != (0, lead.outer) for cut in (lead, *others)):
            lead, inputs = None, tuple(map(run.whole, inputs))
        weights = {key: run.entered(weight) if lead else weight for key, weight in module.named_parameters()}
    with run.outside(), _reparametrize_module(module, weights):
        result: Tensor = module(*inputs)
        shape = (0 if lead is None else lead.shape[0], *result.shape[1:])
    with cuts_by(run.attribute):
        return result if lead is None else mark(result, replace(lead, shape=shape))


def _whole_experts(
    run: RankExchanges, module: Any, compute: Any, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Computes with rows [row, width], each of which goes to one expert, as if there were one choice for each token.
    Ranks behind each other have the same experts, and columns of their own of them."""
    cuts = [cut_of(each) for each in (hidden, index, weights)]
    lead, count, num_parts = cuts[0], run.num_ranks, module.num_expert_parts
    copies = count // num_parts
    parts = Among(num_parts, copies)
    own_part, among = divmod(run.rank, copies)
    by_tokens = lead is not None and all(
        cut is not None and SEQUENCE in cut.sources and (cut.dim, cut.outer) == (0, lead.outer) for cut in cuts
    )
    with run.off():
        by_tokens = by_tokens and index.numel() % num_parts == 0
        if not by_tokens:
            hidden, weights, index = run.for_cut_work(hidden), run.for_cut_work(weights), run.whole(index)
        per_token, first = index.shape[1], own_part * module.num_experts
        experts, order = index.reshape(-1).sort()
        if not by_tokens:  # those of this rank's experts
            width = -(-experts.shape[0] // num_parts)
            own = slice(own_part * width, (own_part + 1) * width)
            experts, order = experts[own], order[own]
        rows, scales = hidden[order // per_token], weights.reshape(-1)[order]
        if by_tokens:
            experts, rows, scales = (Shuffle.apply(each, parts) for each in (experts, rows, scales))
        if by_tokens and copies > 1:
            experts, rows, scales = (Gather.apply(x, 0, 1, copies, among, True) for x in (experts, rows, scales))
        inputs = rows, (experts - first).unsqueeze(1), scales.unsqueeze(1)
        if copies > 1:
            rows = _by_columns(run, module, compute, inputs, copies, among)
        elif run.plan is None:
            rows = compute(module, *inputs)
        if by_tokens:
            back = torch.empty_like(order)
            back[order] = torch.arange(order.shape[0], device=order.device)
            rows = Scatter.apply(rows, 0, copies) if copies > 1 else rows
            rows = Shuffle.apply(rows, parts)[back]
            assert lead is not None
            result = rows.view(*index.shape, -1).sum(1)
            return mark(result, AxisCut((*lead.shape[:1], *result.shape[1:]), 0, count, lead.outer, (), lead.sources))
        result = torch.zeros_like(hidden).index_add(0, order // per_token, rows)
        return mark(result, AxisCut(tuple(result.shape), PARTIAL, count))


def _by_columns(
    run: RankExchanges, module: Any, compute: Any, inputs: tuple[Tensor, ...], num_ranks: int, rank: int
) -> Tensor:
    """Returns this rank's summands of the results of rows, of ranks that have columns of the same experts each. What
    they read is summed up elsewhere in the backward pass. InputError where ranks have no summands."""
    plan = None if run.plan is None else run.plan.of_experts
    inner = LocalRun(num_ranks, rank, gathered=frozenset() if plan is None else plan.gathered, plan=plan)

    def enter(tensor: Tensor) -> None:
        inner.kept(("enter",), tensor, lambda: tensor)

    for tensor in inputs:
        enter(tensor)
    with inner.running():
        rows: Tensor = compute(module, *inputs)
    if plan is not None:
        return inputs[0]
    if (cut := cut_of(rows)) is None or not cut.is_partial:
        raise InputError(
            f"expert={module.num_expert_parts}: the experts of {type(module).__name__} have no columns for {num_ranks} "
            f"cards each; take expert={run.num_ranks} or leave it out"
        )
    return rows
