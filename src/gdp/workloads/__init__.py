"""The built-in workloads: the fourteen of the GDP papers on their numbers of devices, a Llama and a mixture of experts.

The papers give neither batch sizes nor hidden sizes. With the batch sizes here the expert's plan fits in 16 GiB P100s,
while one P100 holds neither gnmt-8 nor any Transformer-XL, AmoebaNet, WaveNet, Llama or mixture of experts. With 80
steps the graph of gnmt-8 has more than 50,000 ops, the size that the GDP paper claims.
"""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

from gdp.errors import InputError
from gdp.workloads import amoebanet, gnmt, inception, llama, mixture_of_experts, rnnlm, transformer_xl, wavenet
from gdp.workloads.base import Example, ExpertRule, Workload, layer_per_device

__all__ = ["Example", "ExpertRule", "Workload", "get", "names"]


def get(name: str) -> Workload:
    """The workload of that name. InputError if there is none."""
    if name not in _WORKLOADS:
        raise InputError(f"workload {name!r} is not built in; one of {', '.join(names())} is expected")
    return _WORKLOADS[name]


def names() -> tuple[str, ...]:
    """The names of all built-in workloads, the papers' first."""
    return tuple(_WORKLOADS)


def _rnnlm(num_layers: int, batch_size: int) -> Workload:
    config = rnnlm.RNNLMConfig(num_layers, batch_size)
    text = f"LSTM language model, {num_layers} layers of {config.hidden}, {config.num_steps} steps unrolled"
    return _workload(f"rnnlm-{num_layers}", num_layers, rnnlm.build, config, text, layer_per_device(num_layers))


def _gnmt(num_layers: int, batch_size: int, num_steps: int) -> Workload:
    config = gnmt.GNMTConfig(num_layers, batch_size, num_steps)
    text = f"LSTM translation with attention, {num_layers} + {num_layers} layers, {num_steps} steps unrolled"
    return _workload(f"gnmt-{num_layers}", num_layers, gnmt.build, config, text, layer_per_device(num_layers))


def _transformer_xl(num_layers: int, batch_size: int) -> Workload:
    config = transformer_xl.TransformerXLConfig(num_layers, batch_size)
    segments = f"{config.num_segments} segments of {config.segment_steps} unrolled"
    text = f"transformer with relative positions, {num_layers} layers, {segments}"
    rule = layer_per_device(num_layers)
    return _workload(f"transformer-xl-{num_layers}", num_layers, transformer_xl.build, config, text, rule)


def _inception(batch_size: int) -> Workload:
    config = inception.InceptionConfig(batch_size)
    text = f"convolutional image classifier, {config.image_size} x {config.image_size} pixels"
    return _workload(f"inception-v3-b{batch_size}", 2, inception.build, config, text)


def _amoebanet(batch_size: int) -> Workload:
    config = amoebanet.AmoebaNetConfig(batch_size)
    text = f"evolved image classifier, {3 * config.cells_per_stack} normal cells, {config.filters} filters"
    return _workload("amoebanet", 4, amoebanet.build, config, text)


def _wavenet(num_stacks: int, batch_size: int) -> Workload:
    config = wavenet.WaveNetConfig(num_stacks, batch_size)
    text = f"raw audio model, {num_stacks} stacks of {config.layers_per_stack} dilated convolutions"
    return _workload(f"wavenet-{num_stacks}x{config.layers_per_stack}", num_stacks, wavenet.build, config, text)


def _llama(batch_size: int) -> Workload:
    config = llama.LlamaConfig(batch_size)
    text = f"Llama-style decoder of 1.1 G parameters, {config.num_layers} layers, {config.num_steps} tokens"
    return _workload("llama-1b", 4, llama.build, config, text)


def _mixture_of_experts(batch_size: int) -> Workload:
    config = mixture_of_experts.MixtureOfExpertsConfig(batch_size)
    experts = f"{config.experts_per_token} of {config.num_experts} experts a token"
    text = f"Llama-style decoder with routed experts, {config.num_layers} layers, {experts}"
    return _workload("moe", 4, mixture_of_experts.build, config, text)


def _workload(
    name: str,
    num_devices: int,
    build: Callable[[Any], Example],
    config: Any,
    description: str,
    expert: ExpertRule | None = None,
) -> Workload:
    family = build.__module__.rpartition(".")[2]
    cluster = f"{num_devices}xp100-pcie-16g"
    return Workload(name, family, cluster, config.batch_size, description, partial(build, config), expert)


_WORKLOADS = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            _rnnlm(2, batch_size=64),
            _rnnlm(4, batch_size=128),
            _rnnlm(8, batch_size=256),
            _gnmt(2, batch_size=256, num_steps=40),
            _gnmt(4, batch_size=256, num_steps=40),
            _gnmt(8, batch_size=192, num_steps=80),
            _transformer_xl(2, batch_size=8),
            _transformer_xl(4, batch_size=6),
            _transformer_xl(8, batch_size=4),
            _inception(32),
            _inception(64),
            _amoebanet(64),
            _wavenet(2, batch_size=56),
            _wavenet(4, batch_size=40),
            _llama(2),
            _mixture_of_experts(8),
        )
    }
)
