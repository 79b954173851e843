"""The built-in workloads: the fourteen of the GDP papers on their numbers of devices, a Llama and a mixture of experts.

The papers give neither batch sizes nor hidden sizes. With the batch sizes here the expert's plan fits in 16 GiB P100s,
while one P100 holds neither gnmt-8 nor any Transformer-XL, AmoebaNet, WaveNet, Llama or mixture of experts. With 80
steps the graph of gnmt-8 has more than 50,000 ops, the size that the GDP paper claims.

A family's file is imported when one of its workloads is built: until then PyTorch is not needed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.workloads.base import Example

ExpertRule = Callable[[str], int]
"""From a module path to the layer whose device the expert gives it; layer l goes to device l modulo their number."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A built-in training workload: a model with example inputs, and the devices that it is usually placed on.

    `build` draws the parameters and inputs from PyTorch's global generator, on the default device; under
    `FakeTensorMode` it allocates nothing. `expert` is None where the expert cuts the model into contiguous stages of
    about equal time instead of giving each layer a device.
    """

    name: str
    family: str
    cluster: str  # a preset for `Cluster.parse`
    batch_size: int
    description: str
    build: "Callable[[], Example]"
    expert: ExpertRule | None = None


def layer_per_device(num_layers: int) -> ExpertRule:
    """The expert of recurrent and transformer models: `layers.i` is layer i, an embedding goes with the first layer,
    all else (attention between encoder and decoder, softmax, loss) with the last. Source: the GDP paper's human experts
    (arXiv 1910.01578).
    """

    def layer_of(module: str) -> int:
        if match := re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", module):
            return int(match[1])
        return 0 if "embedding" in module.split(".") else num_layers - 1

    return layer_of


def get(name: str) -> Workload:
    """The workload of that name. InputError if there is none."""
    if name not in _WORKLOADS:
        raise InputError(f"workload {name!r} is not built in; one of {', '.join(names())} is expected")
    return _WORKLOADS[name]


def names() -> tuple[str, ...]:
    """The names of all built-in workloads, the papers' first."""
    return tuple(_WORKLOADS)


def _rnnlm(num_layers: int, batch_size: int, num_steps: int = 40, hidden: int = 2048) -> Workload:
    def build() -> "Example":
        from gdp.workloads import rnnlm

        return rnnlm.build(rnnlm.RNNLMConfig(num_layers, batch_size, num_steps, hidden))

    text = f"LSTM language model, {num_layers} layers of {hidden}, {num_steps} steps unrolled"
    rule = layer_per_device(num_layers)
    return Workload(f"rnnlm-{num_layers}", "rnnlm", _p100s(num_layers), batch_size, text, build, rule)


def _gnmt(num_layers: int, batch_size: int, num_steps: int) -> Workload:
    def build() -> "Example":
        from gdp.workloads import gnmt

        return gnmt.build(gnmt.GNMTConfig(num_layers, batch_size, num_steps))

    text = f"LSTM translation with attention, {num_layers} + {num_layers} layers, {num_steps} steps unrolled"
    rule = layer_per_device(num_layers)
    return Workload(f"gnmt-{num_layers}", "gnmt", _p100s(num_layers), batch_size, text, build, rule)


def _transformer_xl(num_layers: int, batch_size: int, num_segments: int = 8, segment_steps: int = 384) -> Workload:
    def build() -> "Example":
        from gdp.workloads import transformer_xl

        config = transformer_xl.TransformerXLConfig(num_layers, batch_size, num_segments, segment_steps)
        return transformer_xl.build(config)

    segments = f"{num_segments} segments of {segment_steps} unrolled"
    text = f"transformer with relative positions, {num_layers} layers, {segments}"
    rule = layer_per_device(num_layers)
    return Workload(f"transformer-xl-{num_layers}", "transformer_xl", _p100s(num_layers), batch_size, text, build, rule)


def _inception(batch_size: int, image_size: int = 299) -> Workload:
    def build() -> "Example":
        from gdp.workloads import inception

        return inception.build(inception.InceptionConfig(batch_size, image_size))

    text = f"convolutional image classifier, {image_size} x {image_size} pixels"
    return Workload(f"inception-v3-b{batch_size}", "inception", _p100s(2), batch_size, text, build)


def _amoebanet(batch_size: int, cells_per_stack: int = 6, filters: int = 80) -> Workload:
    def build() -> "Example":
        from gdp.workloads import amoebanet

        return amoebanet.build(amoebanet.AmoebaNetConfig(batch_size, cells_per_stack, filters))

    text = f"evolved image classifier, {3 * cells_per_stack} normal cells, {filters} filters"
    return Workload("amoebanet", "amoebanet", _p100s(4), batch_size, text, build)


def _wavenet(num_stacks: int, batch_size: int, layers_per_stack: int = 9) -> Workload:
    def build() -> "Example":
        from gdp.workloads import wavenet

        return wavenet.build(wavenet.WaveNetConfig(num_stacks, batch_size, layers_per_stack))

    text = f"raw audio model, {num_stacks} stacks of {layers_per_stack} dilated convolutions"
    return Workload(f"wavenet-{num_stacks}x{layers_per_stack}", "wavenet", _p100s(num_stacks), batch_size, text, build)


def _llama(batch_size: int, num_layers: int = 22, num_steps: int = 1024) -> Workload:
    def build() -> "Example":
        from gdp.workloads import llama

        return llama.build(llama.LlamaConfig(batch_size, num_layers, num_steps))

    text = f"Llama-style decoder of 1.1 G parameters, {num_layers} layers, {num_steps} tokens"
    return Workload("llama-1b", "llama", _p100s(4), batch_size, text, build)


def _mixture_of_experts(
    batch_size: int, num_layers: int = 8, num_experts: int = 8, experts_per_token: int = 2
) -> Workload:
    def build() -> "Example":
        from gdp.workloads import mixture_of_experts

        config = mixture_of_experts.MixtureOfExpertsConfig(
            batch_size, num_layers, num_experts=num_experts, experts_per_token=experts_per_token
        )
        return mixture_of_experts.build(config)

    experts = f"{experts_per_token} of {num_experts} experts a token"
    text = f"Llama-style decoder with routed experts, {num_layers} layers, {experts}"
    return Workload("moe", "mixture_of_experts", _p100s(4), batch_size, text, build)


def _p100s(num_devices: int) -> str:
    return f"{num_devices}xp100-pcie-16g"


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
