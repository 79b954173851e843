"""Recurrent stacks, unrolled step by step: drawn cells, directions, skips, shared weights, periods and attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from benchmarks.architectures.families.parts import ClassLoss, Draws, Example, RandomDropout, ValueLoss, vector_norm

_OPS_OF_STEP: Mapping[str, int] = MappingProxyType(
    {"lstm": 60, "gru": 48, "minimal": 36, "highway": 36, "plain": 16, "leaky": 24}
)
CELLS = tuple(_OPS_OF_STEP)


@dataclass(frozen=True, slots=True)
class CellForm:
    """The equations of a cell."""

    kind: str
    norm: str  # of the gates
    has_peepholes: bool  # lstm: gates see the cell
    is_coupled: bool  # lstm: what is forgotten is written
    depth: int  # highway: transitions in a step

    @classmethod
    def draw(cls, draws: Draws) -> "CellForm":
        """Draws a cell; an LSTM has peepholes, coupled gates or a norm."""
        kind, norm = draws.one_of(*CELLS), draws.one_of("none", "none", "layer", "rms")
        peepholes, coupled = draws.chance(0.4), draws.chance(0.4)
        if kind == "lstm" and norm == "none" and not coupled:
            peepholes = True
        return cls(kind, norm, peepholes, coupled, draws.number(2, 4))

    @property
    def num_ops(self) -> int:
        """About as many ops as a step of the cell has, forward and backward."""
        extra = (12 if self.norm != "none" else 0) + (14 if self.kind == "lstm" and self.has_peepholes else 0)
        return _OPS_OF_STEP[self.kind] * (self.depth if self.kind == "highway" else 1) + extra


class DrawnRecurrence(nn.Module):
    """One step of a cell: x [batch, inputs], state [batch, width] and memory -> the next state and memory."""

    def __init__(self, form: CellForm, inputs: int, width: int) -> None:
        super().__init__()
        self.form, self.width = form, width
        count = {"lstm": 3 if form.is_coupled else 4, "gru": 2, "minimal": 1, "highway": 2, "plain": 1, "leaky": 1}
        self.from_input = nn.Linear(inputs, count[form.kind] * width)
        self.from_state = nn.Linear(width, count[form.kind] * width, bias=False)
        self.norm = vector_norm(form.norm, count[form.kind] * width)
        if form.kind == "lstm" and form.has_peepholes:
            self.peephole = nn.Parameter(torch.zeros(width))
        if form.kind in ("gru", "minimal"):
            self.candidate = nn.Linear(inputs + width, width)
        if form.kind == "highway":
            self.deeper = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(form.depth - 1))
        if form.kind == "leaky":
            self.rates = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, state: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.norm(self.from_input(x) + self.from_state(state))
        if self.form.kind == "lstm":
            return self._lstm(gates, memory)
        if self.form.kind == "gru":
            update, reset = gates.sigmoid().chunk(2, dim=1)
            candidate = self.candidate(torch.cat((x, reset * state), dim=1)).tanh()
            return torch.lerp(state, candidate, update), memory
        if self.form.kind == "minimal":
            forget = gates.sigmoid()
            candidate = self.candidate(torch.cat((x, forget * state), dim=1)).tanh()
            return state + forget * (candidate - state), memory
        if self.form.kind == "highway":
            for layer in [None, *self.deeper]:
                candidate, carry = (gates if layer is None else layer(state)).chunk(2, dim=1)
                state = state + carry.sigmoid() * (candidate.tanh() - state)
            return state, memory
        if self.form.kind == "leaky":
            return torch.lerp(state, gates.relu(), self.rates.sigmoid()), memory
        return gates.tanh(), memory

    def _lstm(self, gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        candidate, read, forget, *write = gates.chunk(3 if self.form.is_coupled else 4, dim=1)
        if self.form.has_peepholes:
            forget = forget + self.peephole * memory
        forget = forget.sigmoid()
        written = (1 - forget) if self.form.is_coupled else write[0].sigmoid()
        memory = forget * memory + written * candidate.tanh()
        return read.sigmoid() * memory.tanh(), memory


class HistoryAttention(nn.Module):
    """Attends from a state [batch, width] to states [batch, steps, width], by products or by a small network."""

    def __init__(self, width: int, *, is_additive: bool) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.join = nn.Linear(2 * width, width)
        self.score = nn.Linear(width, 1, bias=False) if is_additive else None

    def forward(self, state: Tensor, history: Tensor) -> Tensor:
        query = self.query(state)
        if self.score is None:
            scores = (history @ query.unsqueeze(2)).transpose(1, 2)
        else:
            scores = self.score((history + query.unsqueeze(1)).tanh()).transpose(1, 2)
        context = (scores.softmax(2) @ history).squeeze(1)
        return self.join(torch.cat((state, context), dim=1)).tanh()


@dataclass(frozen=True, slots=True)
class StackPlan:
    """The layers of a recurrent stack."""

    form: CellForm
    num_layers: int
    is_bidirectional: tuple[bool, ...]
    periods: tuple[int, ...]  # a layer moves in every so many steps
    shared: int  # so many layers in a row have the same weights
    skips: str  # "none", "residual", "dense": the sum of all layers below
    attention: str  # "none", "own": to earlier outputs, "input": to all inputs
    attention_every: int  # steps

    @classmethod
    def draw(cls, draws: Draws, max_layers: int = 6) -> "StackPlan":
        """Draws a plan; half of all stacks attend."""
        num_layers = draws.number(1, max_layers)
        directions = tuple(draws.chance(0.5) for _ in range(num_layers))
        is_uniform = draws.chance(0.5)
        return cls(
            CellForm.draw(draws),
            num_layers,
            (False,) * num_layers if is_uniform else directions,
            tuple(draws.one_of(1, 2, 3, 4) for _ in range(num_layers)) if draws.chance(0.3) else (1,) * num_layers,
            draws.one_of(1, 1, 2, 3),
            draws.one_of("none", "residual", "dense"),
            draws.one_of("none", "none", "own", "input"),
            draws.number(1, 4),
        )

    @property
    def ops_per_step(self) -> float:
        """About as many ops as one step of all layers has."""
        cells = (
            sum((1 + both) / period for both, period in zip(self.is_bidirectional, self.periods, strict=True))
            * self.form.num_ops
        )
        return cells + 4 * self.num_layers + (0 if self.attention == "none" else 36 / self.attention_every)


class RecurrentStack(nn.Module):
    """Steps x [batch, width] -> steps x [batch, width]."""

    def __init__(self, plan: StackPlan, width: int, dropout: float, *, is_additive: bool) -> None:
        super().__init__()
        self.plan = plan
        self.dropout = RandomDropout(dropout)
        num_distinct = -(-plan.num_layers // plan.shared)
        self.cells = nn.ModuleList(DrawnRecurrence(plan.form, width, width) for _ in range(num_distinct))
        self.reverse = nn.ModuleList(
            DrawnRecurrence(plan.form, width, width) if both else nn.Identity() for both in plan.is_bidirectional
        )
        if plan.attention != "none":
            self.attention = HistoryAttention(width, is_additive=is_additive)

    def forward(self, steps: Sequence[Tensor]) -> list[Tensor]:
        outputs = [list(steps)]
        for layer in range(self.plan.num_layers):
            inputs = [self.dropout(x) for x in outputs[-1]]
            if self.plan.skips == "dense" and layer:
                inputs = [x + below for x, below in zip(inputs, outputs[-2], strict=True)]
            y = _unroll(self.cells[layer // self.plan.shared], inputs, self.plan.periods[layer])
            if self.plan.is_bidirectional[layer]:
                back = _unroll(self.reverse[layer], inputs[::-1], self.plan.periods[layer])[::-1]
                y = [one + other for one, other in zip(y, back, strict=True)]
            if self.plan.skips == "residual":
                y = [one + x for one, x in zip(y, outputs[-1], strict=True)]
            outputs.append(y)
        return self._attended(outputs[-1], steps)

    def _attended(self, states: list[Tensor], steps: Sequence[Tensor]) -> list[Tensor]:
        if self.plan.attention == "none":
            return states
        whole = torch.stack(list(steps), dim=1) if self.plan.attention == "input" else None
        answers = list(states)
        for number in range(self.plan.attention_every, len(states), self.plan.attention_every):
            history = torch.stack(answers[max(number - 8, 0) : number], dim=1) if whole is None else whole
            answers[number] = self.attention(states[number], history)
        return answers


def _unroll(cell: nn.Module, steps: Sequence[Tensor], period: int) -> list[Tensor]:
    """Returns a cell's states from zero on; between its moves a state stays."""
    state = steps[0].new_zeros(steps[0].shape)
    memory, states = state, []
    for number, x in enumerate(steps):
        if number % period == 0:
            state, memory = cell(x, state, memory)
        states.append(state)
    return states


class RecurrentModel(nn.Module):
    """Tokens or frames -> loss of every step, of every few steps, or of the last one."""

    def __init__(self, draws: Draws, plan: StackPlan, inputs: int, num_outputs: int, *, has_tokens: bool) -> None:
        super().__init__()
        width = draws.size(256, 2048, 64)
        self.first = nn.Embedding(inputs, width) if has_tokens else nn.Linear(inputs, width)
        self.is_stepwise = draws.chance(0.5)  # the first layer is applied step by step
        self.stack = RecurrentStack(plan, width, draws.one_of(0.0, 0.1, 0.3), is_additive=draws.chance(0.5))
        self.heads, self.every = draws.one_of("steps", "joint", "last"), draws.number(1, 3)
        is_smooth = draws.chance(0.5)
        self.loss = ClassLoss(width, num_outputs) if has_tokens else ValueLoss(width, num_outputs, is_smooth=is_smooth)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        steps = [self.first(x) for x in inputs.unbind(0)] if self.is_stepwise else self.first(inputs).unbind(0)
        states = self.stack(steps)
        if self.heads == "last":
            return self.loss(states[-1], targets[-1])
        if self.heads == "joint":
            return self.loss(torch.stack(states), targets)
        pairs = list(zip(states, targets.unbind(0), strict=True))[:: self.every]
        return torch.stack([self.loss(state, target) for state, target in pairs]).mean()


def build(draws: Draws, num_ops: int) -> Example:
    """Draws a recurrent model of about `num_ops` ops, with one batch."""
    plan = StackPlan.draw(draws)
    num_steps = min(max(round(num_ops / (plan.ops_per_step + 12)), 3), 64)
    batch, has_tokens = draws.size(64, 2048), draws.chance(0.6)
    if has_tokens:
        vocabulary = draws.size(1000, 40000, 100)
        model = RecurrentModel(draws, plan, vocabulary, vocabulary, has_tokens=True)
        return model, (torch.randint(vocabulary, (num_steps, batch)), torch.randint(vocabulary, (num_steps, batch))), {}
    num_features, num_outputs = draws.size(16, 512), draws.size(8, 512)
    model = RecurrentModel(draws, plan, num_features, num_outputs, has_tokens=False)
    return model, (torch.randn(num_steps, batch, num_features), torch.randn(num_steps, batch, num_outputs)), {}
