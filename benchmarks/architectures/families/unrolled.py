"""Long unrolled recurrent nets: stacks over many steps with a loss at each, or a stack that sees all of another's."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.architectures.families.parts import ClassLoss, Draws, Example, ValueLoss
from benchmarks.architectures.families.recurrent import CellForm, HistoryAttention, RecurrentStack, StackPlan

_LAYERS = (1, 2, 2, 3, 4, 6, 8)
_STEPS = (4, 160)
_HEAD_OPS, _ATTENTION_OPS = 12, 36  # of a step, about, forward and backward


def _plan(draws: Draws) -> StackPlan:
    """Draws a stack whose layers move in every step; the first may read in both directions."""
    num_layers = draws.one_of(*_LAYERS)
    return StackPlan(
        form=CellForm.draw(draws),
        num_layers=num_layers,
        is_bidirectional=(draws.chance(0.2), *(False,) * (num_layers - 1)),
        periods=(1,) * num_layers,
        shared=1,
        skips=draws.one_of("none", "residual", "dense"),
        attention="none",
        attention_every=1,
    )


class UnrolledModel(nn.Module):
    """Tokens or frames [steps, ...] -> mean loss of the steps; later stacks attend to all states of the one before."""

    def __init__(
        self, draws: Draws, plans: Sequence[StackPlan], inputs: int, num_outputs: int, *, has_tokens: bool
    ) -> None:
        super().__init__()
        width = draws.size(512, 3072, 64)
        dropout, is_additive = draws.one_of(0.0, 0.1, 0.3), draws.chance(0.5)
        self.first = nn.ModuleList(
            nn.Embedding(inputs, width) if has_tokens else nn.Linear(inputs, width) for _ in plans
        )
        self.stacks = nn.ModuleList(RecurrentStack(plan, width, dropout, is_additive=is_additive) for plan in plans)
        self.attention = nn.ModuleList(HistoryAttention(width, is_additive=is_additive) for _ in plans[1:])
        self.every = draws.one_of(1, 1, 1, 2)
        is_smooth = draws.chance(0.5)
        self.loss = ClassLoss(width, num_outputs) if has_tokens else ValueLoss(width, num_outputs, is_smooth=is_smooth)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        states: list[Tensor] = []
        for number, stack in enumerate(self.stacks):
            steps = [self.first[number](x) for x in inputs.unbind(0)]
            if number:
                history = torch.stack(states, dim=1)
                steps = [self.attention[number - 1](x, history) for x in steps]
            states = stack(steps)
        pairs = list(zip(states, targets.unbind(0), strict=True))[:: self.every]
        return torch.stack([self.loss(state, target) for state, target in pairs]).mean()


def build(draws: Draws, num_ops: int) -> Example:
    """Draws one or two stacks, unrolled to about `num_ops` ops, with one batch."""
    plans = [_plan(draws) for _ in range(draws.one_of(1, 1, 2))]
    ops_per_step = sum(plan.ops_per_step for plan in plans) + _HEAD_OPS + _ATTENTION_OPS * (len(plans) - 1)
    num_steps = min(max(round(num_ops / ops_per_step), _STEPS[0]), _STEPS[1])
    batch, has_tokens = draws.size(32, 512), draws.chance(0.7)
    if has_tokens:
        vocabulary = draws.size(2000, 50000, 100)
        model = UnrolledModel(draws, plans, vocabulary, vocabulary, has_tokens=True)
        return model, (torch.randint(vocabulary, (num_steps, batch)), torch.randint(vocabulary, (num_steps, batch))), {}
    num_features, num_outputs = draws.size(16, 1024), draws.size(64, 4096)
    model = UnrolledModel(draws, plans, num_features, num_outputs, has_tokens=False)
    return model, (torch.randn(num_steps, batch, num_features), torch.randn(num_steps, batch, num_outputs)), {}
