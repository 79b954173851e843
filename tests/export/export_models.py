"""Small models as users have them, their graphs, and plans that targets cannot express as they are."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import gdp
from gdp.graph import Graph
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem

Example = tuple[nn.Module, tuple[Any, ...]]


class Tied(nn.Module):
    """A transformer whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(4))  # type: ignore[arg-type]
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def tied() -> Example:
    torch.manual_seed(0)
    return Tied().eval(), (torch.arange(16).reshape(2, 8),)


def bert() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return BertForMaskedLM(config).eval(), (torch.arange(32).reshape(2, 16),)


def llama(num_layers: int = 4) -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval(), (torch.arange(32).reshape(2, 16),)


MODELS = {"tied": tied, "bert": bert, "llama": llama}


@cache
def graph_of(name: str, training: bool = False) -> Graph:
    """The captured graph of one of MODELS."""
    model, args = MODELS[name]()
    return gdp.capture(model, args, name=name, training=training).graph


@cache
def planned(name: str, devices: str = "3xp100-pcie-16g", training: bool = False) -> tuple[Problem, Plan]:
    """An op-level plan: the search sees ops as work of milliseconds, so that it uses all devices."""
    graph, cluster = graph_of(name, training), gdp.Cluster.parse(devices)
    plan = gdp.place(graph, cluster, budget="300sims", robust=0.0)
    return Problem.build(graph, cluster), plan
