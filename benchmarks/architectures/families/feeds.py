"""Layers that work on each step alone: feed-forwards, and mixtures of them as experts."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.architectures.families.parts import Draws, activation

FEEDS = ("plain", "gated", "squared", "local", "deep", "parallel")
CAUSAL_FEEDS = ("plain", "gated", "squared", "deep", "parallel")
ROUTINGS = ("all", "slots", "chosen", "fixed")


class DrawnFeedForward(nn.Module):
    """[..., steps, width] -> the same shape, through an inner width."""

    def __init__(self, kind: str, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.kind, self.act = kind, activation(act)
        self.first = nn.Linear(width, 2 * inner if kind == "gated" else inner)
        self.last = nn.Linear(inner, width)
        if kind == "local":
            self.middle: nn.Module = nn.Conv1d(inner, inner, 3, padding=1, groups=inner)
        elif kind == "deep":
            self.middle = nn.Linear(inner, inner)
        elif kind == "parallel":
            self.other_first, self.other_last = nn.Linear(width, inner // 2), nn.Linear(inner // 2, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gated":
            gate, y = self.first(x).chunk(2, dim=-1)
            return self.last(self.act(gate) * y)
        y = self.act(self.first(x))
        if self.kind == "squared":
            y = y.square()
        elif self.kind == "local":
            y = self.act(self.middle(y.transpose(1, 2)).transpose(1, 2))
        elif self.kind == "deep":
            y = self.act(self.middle(y))
        elif self.kind == "parallel":
            return self.last(y) + self.other_last(self.act(self.other_first(x)))
        return self.last(y)


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Experts and the way to them.

    "all": every expert sees every step, and gates weigh the answers. "slots": experts see weighted means of steps
    (Puigcerver et al. 2023, arXiv 2308.00951). "chosen": each expert chooses its steps (Zhou et al. 2022,
    arXiv 2202.09368). "fixed": steps are dealt out by their position.
    """

    routing: str
    kinds: tuple[str, ...]  # of each expert
    has_shared: bool  # a further expert sees every step

    @classmethod
    def draw(cls, draws: Draws) -> "ExpertPlan":
        """Draws two to eight experts of one or two kinds."""
        kinds = draws.some(CAUSAL_FEEDS, draws.number(1, 2))
        count = 2 ** draws.number(1, 3)
        return cls(draws.one_of(*ROUTINGS), tuple(draws.one_of(*kinds) for _ in range(count)), draws.chance(0.4))

    @property
    def num_ops(self) -> int:
        """About as many ops as a step of these experts has."""
        around = {"all": 8, "slots": 4, "chosen": 14, "fixed": 4}[self.routing]
        return (around + 22) * len(self.kinds) + 24 * self.has_shared + 24


class ExpertFeed(nn.Module):
    """[batch, steps, width] -> the same shape, through experts."""

    def __init__(self, plan: ExpertPlan, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.plan = plan
        self.experts = nn.ModuleList(DrawnFeedForward(kind, width, inner, act) for kind in plan.kinds)
        if plan.routing != "fixed":
            self.router = nn.Linear(width, len(plan.kinds), bias=False)
        self.shared = DrawnFeedForward("plain", width, inner, act) if plan.has_shared else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        y = getattr(self, f"_{self.plan.routing}")(tokens)
        return (y if self.shared is None else y + self.shared(tokens)).view(x.shape)

    def _all(self, tokens: Tensor) -> Tensor:
        gates = self.router(tokens).softmax(1).unbind(1)
        parts = [expert(tokens) * gate.unsqueeze(1) for expert, gate in zip(self.experts, gates, strict=True)]
        return sum(parts[1:], parts[0])

    def _slots(self, tokens: Tensor) -> Tensor:
        logits = self.router(tokens)
        means = logits.softmax(0).t() @ tokens
        answers = [expert(mean) for expert, mean in zip(self.experts, means.split(1), strict=True)]
        return logits.softmax(1) @ torch.cat(answers)

    def _chosen(self, tokens: Tensor) -> Tensor:
        scores, total = self.router(tokens).softmax(1), torch.zeros_like(tokens)
        for expert, score in zip(self.experts, scores.unbind(1), strict=True):
            weights, chosen = score.topk(len(tokens) // len(self.experts), sorted=False)
            total = total.index_add(0, chosen, expert(tokens.index_select(0, chosen)) * weights.unsqueeze(1))
        return total

    def _fixed(self, tokens: Tensor) -> Tensor:
        dealt = functional.pad(tokens, (0, 0, 0, -len(tokens) % len(self.experts))).chunk(len(self.experts))
        answers = [expert(part) for expert, part in zip(self.experts, dealt, strict=True)]
        return torch.cat(answers)[: len(tokens)]
