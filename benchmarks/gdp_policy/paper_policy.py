"""GDP as published: "GDP: Generalized Device Placement for Dataflow Graphs", Zhou et al., arXiv 1910.01578 (2019).

    operator type, output size -> GraphSAGE over adjacent ops -> superposed segment transformer -> softmax over devices

It knows neither costs nor devices, and its softmax has a fixed number of entries: device d of one cluster is device d
of any other. The network does not depend on the sample, so S samples cost one pass.
N ops, C choices (a group's first op chooses for the group), S samples, D devices of the cluster.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gdp_policy.graph_embedding import GraphEmbedding, GraphEmbeddingConfig
from benchmarks.gdp_policy.placement_network import SegmentTransformer, SegmentTransformerConfig, Superposition
from gdp.arrays import F32, F64, I64
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.policy.checkpoint import seeded
from gdp.policy.construction import Instance
from gdp.policy.scheduler import Policy, Rollouts
from gdp.simulator.problem import Problem

_KINDS = """
aten._fused_adam_ aten._log_softmax aten._log_softmax_backward_data aten._scaled_dot_product_flash_attention_for_cpu
aten._scaled_dot_product_flash_attention_for_cpu_backward aten._softmax aten._softmax_backward_data aten.add aten.add_
aten.addmm aten.arange aten.avg_pool2d aten.avg_pool2d_backward aten.bmm aten.cat aten.clone aten.constant_pad_nd
aten.convolution aten.convolution_backward aten.div aten.embedding aten.embedding_dense_backward aten.index_add
aten.index_select aten.masked_fill aten.max_pool2d_with_indices aten.max_pool2d_with_indices_backward aten.mean
aten.mm aten.mul aten.mv aten.native_batch_norm aten.native_batch_norm_backward aten.native_dropout
aten.native_dropout_backward aten.native_layer_norm aten.native_layer_norm_backward aten.neg aten.new_zeros
aten.nll_loss_backward aten.nll_loss_forward aten.pow aten.relu aten.rsqrt aten.scatter aten.sigmoid
aten.sigmoid_backward aten.silu aten.silu_backward aten.slice_backward aten.stack aten.sum aten.tanh
aten.tanh_backward aten.threshold_backward buffer input parameter
"""
KINDS = tuple(_KINDS.split())
"""The commoner op kinds of the built-in workloads. The rare ones train the buckets of unknown kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperConfig:
    """Sizes and optional parts of the policy, which fix the shapes and the meaning of its parameters.

    Attention is switched in `placer`.
    """

    kinds: tuple[str, ...] = KINDS
    num_unknown_kinds: int = 4  # buckets for all other kinds
    kind_width: int = 20  # as in HDP (Mirhoseini et al., ICLR 2018); GDP gives none
    graph: GraphEmbeddingConfig = field(default_factory=GraphEmbeddingConfig)
    placer: SegmentTransformerConfig = field(default_factory=SegmentTransformerConfig)
    superposition: bool = True
    initial: str = "pytorch"  # weights of layers: PyTorch's defaults; or "glorot", TensorFlow's, which tell ops apart
    max_devices: int = 8  # entries of the softmax; the paper's largest machine

    def __post_init__(self) -> None:
        if min(self.num_unknown_kinds, self.kind_width, self.max_devices) < 1:
            raise ValueError("num_unknown_kinds, kind_width and max_devices of at least 1 are expected")
        if len(set(self.kinds)) < len(self.kinds):
            raise ValueError("kinds names one twice; name each once")
        if self.initial not in ("pytorch", "glorot"):
            raise ValueError(f"initial is {self.initial!r}; 'pytorch' or 'glorot' is expected")


@dataclass(frozen=True, eq=False)
class PaperInstance(Instance):
    """A problem as tensors on the policy's device."""

    kinds: Tensor  # int64 [N] row of the embedding
    log_bytes: Tensor  # float32 [N, 1]
    edge_index: Tensor  # int64 [2, E] every pair of ops that share a tensor, in both directions
    allowed: Tensor  # bool [C, D]
    choosers: I64  # [C] the first op of each unit
    unit_of_op: I64  # [N]


class PaperPolicy(Policy):
    """The network and its distribution."""

    name = "paper"

    def __init__(self, config: PaperConfig) -> None:
        super().__init__()
        self.config = config
        self.kind = nn.Embedding(len(config.kinds) + config.num_unknown_kinds, config.kind_width)
        self.graph = GraphEmbedding(config.kind_width + 1, config.graph)
        self.project = nn.Linear(config.graph.hidden, config.placer.d_model)
        self.placer = (Superposition if config.superposition else SegmentTransformer)(config.placer)
        self.head = nn.Linear(config.placer.d_model, config.max_devices)
        if config.initial == "glorot":
            self.apply(_start_as_in_tensorflow)

    def instance(self, problem: Problem, rng: np.random.Generator) -> PaperInstance:
        """Returns the features of `problem`, nothing random. Raises InputError for more than `max_devices` devices.

        The paper's features are type, output shape and adjacency. Our graphs store no shapes: an op's output is the
        logarithm of the bytes that it allocates.
        """
        if problem.num_devices > self.config.max_devices:
            raise InputError(
                f"cluster {problem.cluster.name!r} has {problem.num_devices} devices, policy {self.name!r} takes at "
                f"most {self.config.max_devices}; place on fewer devices or use another policy"
            )
        _, choosers = np.unique(problem.graph.group_index, return_index=True)
        numpy_arrays = (
            kind_numbers(problem.graph.kinds, self.config.kinds, self.config.num_unknown_kinds),
            log_output_bytes(problem.graph)[:, None],
            symmetric_edges(problem.graph),
            problem.allowed[choosers],
        )
        kinds, log_bytes, edge_index, allowed = (torch.from_numpy(array).to(self.device) for array in numpy_arrays)
        return PaperInstance(problem, kinds, log_bytes, edge_index, allowed, choosers, problem.graph.group_index)

    def sample(
        self, instance: Instance, num_samples: int, rng: np.random.Generator, *, temperature: float = 1.0
    ) -> Rollouts:
        """Draws `num_samples` placements; at temperature 0 each choice is the likeliest device, the lower of equals."""
        assert isinstance(instance, PaperInstance)
        with torch.no_grad():
            log_probs = _log_softmax(self._logits(instance), temperature)
            uniform = rng.random((num_samples, len(instance.choosers)))
            choices = _invert(log_probs.double().exp().cpu().numpy(), uniform)
            return Rollouts(choices[:, instance.unit_of_op], _select(log_probs, choices), None)

    def score(self, instance: Instance, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Returns (log-probability [S, C], mean entropy); `rollouts` may hold any placements that keep groups."""
        assert isinstance(instance, PaperInstance)
        log_probs = _log_softmax(self._logits(instance))
        finite = log_probs.masked_fill(~instance.allowed, 0.0)  # 0 log 0 = 0
        entropy = -(log_probs.exp() * finite).sum(dim=1).mean()
        return _select(log_probs, rollouts.placements[:, instance.choosers]), entropy

    def _logits(self, instance: PaperInstance) -> Tensor:
        """[C, D] minus infinity where an op may not go. Entries of the softmax beyond the cluster's are left out."""
        x = torch.cat((self.kind(instance.kinds), instance.log_bytes), dim=1)
        x = self.project(self.graph(x, instance.edge_index))
        x = self.placer(x)[torch.from_numpy(instance.choosers).to(x.device)]
        logits: Tensor = self.head(x)[:, : instance.problem.num_devices]
        return logits.masked_fill(~instance.allowed, -torch.inf)


def paper_policy(seed: int = 0, **changes: Any) -> PaperPolicy:
    """Returns the policy by default but for `changes`, with parameters that depend on `seed` alone."""
    return seeded(lambda: PaperPolicy(PaperConfig(**changes)), seed)


def _start_as_in_tensorflow(layer: nn.Module) -> None:
    """Draws weights as X. Glorot and Y. Bengio (AISTATS 2010) do, with biases of 0: the default of TensorFlow's layers.

    With PyTorch's, weights are smaller and biases are drawn as well. After four iterations of GraphSAGE and the placer
    all ops then look alike.
    """
    if isinstance(layer, nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def kind_numbers(kinds: Sequence[str], common: Sequence[str], num_unknown: int) -> I64:
    """Returns the place of each kind [N] in `common`, else one of `num_unknown` numbers behind, by its CRC-32."""
    numbers = {kind: number for number, kind in enumerate(common)}
    for kind in set(kinds) - numbers.keys():
        numbers[kind] = len(common) + zlib.crc32(kind.encode()) % num_unknown
    return np.array([numbers[kind] for kind in kinds], np.int64)


def log_output_bytes(graph: Graph) -> F32:
    """[N] log2(1 + bytes of the tensors that the op makes, views left out) / 32: 1 for 4 GiB."""
    owned = graph.view_of < 0
    num_bytes = np.bincount(graph.producers[owned], graph.tensor_bytes[owned], graph.num_ops)
    return np.asarray(np.log2(1 + num_bytes) / 32, np.float32)


def symmetric_edges(graph: Graph) -> I64:
    """[2, E] (from, to) of each pair of producer and consumer, once in each direction, sorted by `to`."""
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    keys = np.unique(np.concatenate((targets * graph.num_ops + sources, sources * graph.num_ops + targets)))
    return np.stack((keys % graph.num_ops, keys // graph.num_ops))


def _log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[C, D] log-probabilities; at temperature 0 all is on the largest."""
    if temperature == 0:
        return torch.full_like(logits, -torch.inf).scatter(1, logits.argmax(dim=1, keepdim=True), 0.0)
    return torch.log_softmax(logits / temperature, dim=1)


def _invert(probs: F64, uniform: F64) -> I64:
    """[S, C] devices where the distribution functions of `probs` [C, D] pass `uniform` [S, C], below 1."""
    passed = np.cumsum(probs, axis=1)
    passed /= passed[:, -1:]  # exactly 1 at the end, so that rounding never reaches a device of probability 0
    choices = np.zeros(uniform.shape, np.int64)
    for column in passed.T:
        choices += uniform >= column
    return choices


def _select(log_probs: Tensor, choices: I64) -> Tensor:
    """[S, C] log-probability of each choice, from [C, D]."""
    return log_probs.gather(1, torch.from_numpy(choices.T).to(log_probs.device)).T
