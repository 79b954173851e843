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


class Block(nn.Module):
    """Adds to its input what two linear layers make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]


def blocks() -> Example:
    """Layers without attention, whose head is the embedding."""
    torch.manual_seed(0)
    model = Tied()
    model.layers = nn.ModuleList(Block() for _ in range(4))
    return model, (torch.arange(16).reshape(2, 8),)


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


def llama(num_layers: int = 4, num_heads: int = 2) -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval(), (torch.arange(32).reshape(2, 16),)


def grouped() -> Example:
    """A decoder with two query heads for each head of keys and values."""
    return llama(2, 4)


class Body(nn.Module):
    """Layers, with a buffer and a parameter of the container itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.register_buffer("shift", torch.full((1,), 3.0), persistent=False)
        self.gain = nn.Parameter(torch.full((64,), 5.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers[:3]:
            x = torch.relu(layer(x))
        return self.layers[3](x * self.gain.exp() + self.shift)  # type: ignore[no-any-return]


class Net(nn.Module):
    """A body between tensors of the model itself, of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(64))
        self.unused = nn.Parameter(torch.ones(64))
        self.model, self.head = Body(), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x + self.token))  # type: ignore[no-any-return]


def owned() -> Example:
    torch.manual_seed(0)
    return Net().eval(), (torch.randn(8, 64),)


_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def clip() -> Example:
    """A model with `logit_scale` of its own."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    text = {**_SMALL, "vocab_size": 100, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
    config = CLIPConfig(
        text_config=text, vision_config={**_SMALL, "image_size": 32, "patch_size": 8}, projection_dim=16
    )
    return CLIPModel(config).eval(), (torch.arange(32).reshape(2, 16), torch.randn(2, 3, 32, 32))


def gemma3n() -> Example:
    """A decoder whose body has scales of its own, projections in lists, and a table of embeddings for each layer."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        **_SMALL | {"num_hidden_layers": 4},
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 4,
        vocab_size=100,
        vocab_size_per_layer_input=100,
        hidden_size_per_layer_input=8,
        use_cache=False,
    )
    return Gemma3nForCausalLM(config).eval(), (torch.arange(32).reshape(2, 16),)


def siglip() -> Example:
    """A model with `logit_scale` and `logit_bias` of its own, and a probe of its vision head."""
    from transformers import SiglipConfig, SiglipModel

    torch.manual_seed(0)
    text = {**_SMALL, "vocab_size": 100, "max_position_embeddings": 16, "projection_size": 32}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = SiglipConfig(text_config=text, vision_config={**_SMALL, "image_size": 32, "patch_size": 8})
    return SiglipModel(config).eval(), (torch.arange(32).reshape(2, 16), torch.randn(2, 3, 32, 32))


class Queries(nn.Module):
    """Queries of the model itself and of a body in a body, as BLIP-2's, for layers that have tensors of their own."""

    class Inner(nn.Module):
        """Layers in a dictionary, with a parameter and a buffer beside them."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleDict({name: nn.ModuleList(nn.Linear(64, 64) for _ in range(2)) for name in "ab"})
            self.position = nn.Parameter(torch.randn(3, 64))
            self.register_buffer("steps", torch.arange(3.0))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.position
            for layer in (*self.blocks["a"], *self.blocks["b"]):
                x = torch.relu(layer(x))
            return x * self.steps[:, None]

    class Outer(nn.Module):
        """The inner body, with a scale."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = Queries.Inner(), nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.query_tokens = nn.Parameter(torch.randn(1, 3, 64))
        self.body, self.head = Queries.Outer(), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.query_tokens.expand(len(x), -1, -1) + x))  # type: ignore[no-any-return]


def queries() -> Example:
    torch.manual_seed(0)
    return Queries().eval(), (torch.randn(2, 3, 64),)


MODELS = {"tied": tied, "bert": bert, "llama": llama, "owned": owned, "clip": clip, "gemma3n": gemma3n}
MODELS |= {"siglip": siglip, "queries": queries, "blocks": blocks, "grouped": grouped}


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
