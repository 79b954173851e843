"""A mixture-of-experts decoder: Llama's attention, top-k routed SwiGLU experts (Jiang et al. 2024, arXiv 2401.04088).

Each expert takes a fixed number of tokens, those beyond it skip the layer (Lepikhin et al. 2020, arXiv 2006.16668), so
every shape is known before the data. A loss balances the router (Fedus et al. 2021, arXiv 2101.03961, section 2.2).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.models.llama import GroupedQueryAttention, Rotary, SwiGLU, check_heads
from gdp.errors import InputError
from gdp.models.papers.base import Example, ModelConfig, SoftmaxLoss, WordEmbedding

BALANCE_WEIGHT = 0.01  # Fedus et al. 2021, section 2.2


@dataclass(frozen=True, slots=True)
class MixtureOfExpertsConfig(ModelConfig):
    """Sizes of the model and of one batch. An expert takes `1 + spare_capacity` times its even share of the tokens."""

    batch_size: int
    num_layers: int = 8
    num_steps: int = 1024
    hidden: int = 1024
    num_heads: int = 16
    num_key_heads: int = 4
    inner: int = 2816
    num_experts: int = 8
    experts_per_token: int = 2
    spare_capacity: float = 0.25
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        check_heads(type(self).__name__, self.hidden, self.num_heads, self.num_key_heads)
        if self.experts_per_token > self.num_experts:
            raise InputError(
                f"{type(self).__name__}: experts_per_token is {self.experts_per_token}; "
                f"at most num_experts ({self.num_experts}) is expected"
            )


class Router(nn.Module):
    """Chooses K experts for each of T tokens: x [T, hidden] -> slots, gates [K, T], sources [E * C], balance loss.

    Slot `e * C + i` is place i at expert e, of E experts with C places each. `slots` gives each choice's slot, E * C
    for a choice that found no place; `sources` each slot's token, T for an empty slot. First choices go first.
    """

    def __init__(self, config: MixtureOfExpertsConfig, capacity: int) -> None:
        super().__init__()
        self.num_experts, self.num_choices, self.capacity = config.num_experts, config.experts_per_token, capacity
        self.scores = nn.Linear(config.hidden, config.num_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_tokens, num_slots = len(x), self.num_experts * self.capacity
        probabilities = self.scores(x).softmax(dim=-1)
        gates, choices = probabilities.topk(self.num_choices, dim=-1)
        gates = gates / gates.sum(dim=-1, keepdim=True)
        chosen = choices.T.flatten()  # all first choices, then all second ones
        experts = torch.arange(self.num_experts, device=x.device)
        is_chosen = (chosen.unsqueeze(1) == experts).long()
        places = (is_chosen.cumsum(dim=0) * is_chosen).sum(dim=1) - 1
        slots = torch.where(places < self.capacity, chosen * self.capacity + places, num_slots)
        tokens = torch.arange(num_tokens, device=x.device).repeat(self.num_choices)
        sources = torch.full((num_slots + 1,), num_tokens, device=x.device).scatter(0, slots, tokens)[:num_slots]
        share = is_chosen.to(x.dtype).mean(dim=0)
        balance = self.num_experts * (share * probabilities.mean(dim=0)).sum()
        return slots.view(self.num_choices, num_tokens), gates.T, sources, balance


class RoutedFeedForward(nn.Module):
    """Each token through its experts, weighted by their gates: x [..., hidden] -> the same, and the balance loss."""

    def __init__(self, config: MixtureOfExpertsConfig) -> None:
        super().__init__()
        choices = config.batch_size * config.num_steps * config.experts_per_token
        self.capacity = math.ceil(choices * (1 + config.spare_capacity) / config.num_experts)
        self.router = Router(config, self.capacity)
        self.experts = nn.ModuleList(SwiGLU(config.hidden, config.inner) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, -2)
        slots, gates, sources, balance = self.router(tokens)
        nothing = tokens.new_zeros(1, tokens.shape[1])  # input of an empty slot, output of a choice without a place
        padded = torch.cat((tokens, nothing))
        outputs = [
            expert(padded.index_select(0, places))
            for expert, places in zip(self.experts, sources.split(self.capacity), strict=True)
        ]
        gathered = torch.cat((*outputs, nothing)).index_select(0, slots.flatten()).view(*slots.shape, -1)
        return (gathered * gates.unsqueeze(-1)).sum(dim=0).view(x.shape), balance


class MixtureOfExpertsLayer(nn.Module):
    """Attention and routed experts, each with normalisation before it and a residual connection."""

    def __init__(self, config: MixtureOfExpertsConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.attention = GroupedQueryAttention(config.hidden, config.num_heads, config.num_key_heads)
        self.feed_forward_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.feed_forward = RoutedFeedForward(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), rotary)
        routed, balance = self.feed_forward(self.feed_forward_norm(x))
        return x + routed, balance


class MixtureOfExperts(nn.Module):
    """Tokens and next tokens, both [batch, steps] -> mean cross-entropy plus the weighted mean balance loss."""

    def __init__(self, config: MixtureOfExpertsConfig) -> None:
        super().__init__()
        self.embedding = WordEmbedding(config.vocabulary, config.hidden, deviation=0.02)
        self.rotary = Rotary(config.hidden // config.num_heads)
        self.layers = nn.ModuleList(MixtureOfExpertsLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.softmax = SoftmaxLoss(config.hidden, config.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, balances = self.embedding(tokens), []
        rotary = self.rotary(x)
        for layer in self.layers:
            x, balance = layer(x, rotary)
            balances.append(balance)
        loss: Tensor = self.softmax(self.norm(x), targets)
        return loss + BALANCE_WEIGHT * torch.stack(balances).mean()


def build(config: MixtureOfExpertsConfig) -> Example:
    """The model with one batch of random tokens."""
    shape = config.batch_size, config.num_steps
    tokens, targets = (torch.randint(config.vocabulary, shape) for _ in range(2))
    return MixtureOfExperts(config), (tokens, targets), {}
