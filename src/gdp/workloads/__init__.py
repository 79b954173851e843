"""The built-in workloads: the fourteen of the GDP papers on their numbers of devices, and further models on others.

The papers give neither batch sizes nor hidden sizes. With the batch sizes here the expert's plan fits in 16 GiB P100s,
while one P100 holds neither gnmt-8 nor any Transformer-XL, AmoebaNet or WaveNet. With 80 steps the graph of gnmt-8 has
more than 50,000 ops, the size that the GDP paper claims. The further models were chosen for the shapes of their graphs:
branches, towers, long recurrences, shared parameters, skips. Contiguous stages of each fit in its devices, most models
do not fit in a single one.

A family's file is imported when one of its workloads is built: until then PyTorch is not needed.
"""

from types import MappingProxyType

from gdp.errors import InputError
from gdp.workloads import families
from gdp.workloads.variants import training_variants
from gdp.workloads.workload import ExpertRule, Family, Workload, layer_per_device

__all__ = [
    "ExpertRule", "Family", "Workload", "further_names", "get", "layer_per_device", "names", "paper_names",
    "training_variants",
]  # fmt: skip


def get(name: str) -> Workload:
    """The workload of that name. InputError if there is none."""
    if name not in _WORKLOADS:
        raise InputError(f"workload {name!r} is not built in; one of {', '.join(names())} is expected")
    return _WORKLOADS[name]


def names() -> tuple[str, ...]:
    """The names of all built-in workloads, the papers' first."""
    return tuple(_WORKLOADS)


def paper_names() -> tuple[str, ...]:
    """The names of the fourteen workloads of the GDP papers."""
    return tuple(workload.name for workload in _PAPERS)


def further_names() -> tuple[str, ...]:
    """The names of the models beyond the papers'."""
    return tuple(workload.name for workload in _FURTHER)


_PAPERS = (
    families.RNNLM.workload("rnnlm-2", "2xp100-pcie-16g", 64),
    families.RNNLM.workload("rnnlm-4", "4xp100-pcie-16g", 128, num_layers=4),
    families.RNNLM.workload("rnnlm-8", "8xp100-pcie-16g", 256, num_layers=8),
    families.GNMT.workload("gnmt-2", "2xp100-pcie-16g", 256),
    families.GNMT.workload("gnmt-4", "4xp100-pcie-16g", 256, num_layers=4),
    families.GNMT.workload("gnmt-8", "8xp100-pcie-16g", 192, num_layers=8, num_steps=80),
    families.TRANSFORMER_XL.workload("transformer-xl-2", "2xp100-pcie-16g", 8),
    families.TRANSFORMER_XL.workload("transformer-xl-4", "4xp100-pcie-16g", 6, num_layers=4),
    families.TRANSFORMER_XL.workload("transformer-xl-8", "8xp100-pcie-16g", 4, num_layers=8),
    families.INCEPTION.workload("inception-v3-b32", "2xp100-pcie-16g", 32),
    families.INCEPTION.workload("inception-v3-b64", "2xp100-pcie-16g", 64),
    families.AMOEBANET.workload("amoebanet", "4xp100-pcie-16g", 64),
    families.WAVENET.workload("wavenet-2x9", "2xp100-pcie-16g", 56),
    families.WAVENET.workload("wavenet-4x9", "4xp100-pcie-16g", 40, num_stacks=4),
)
_FURTHER = (
    families.LLAMA.workload("llama-1b", "4xp100-pcie-16g", 2),
    families.MIXTURE_OF_EXPERTS.workload("moe", "4xp100-pcie-16g", 8),
    families.RESNET.workload("resnet-101", "3xl4-24g", 256),
    families.DENSENET.workload("densenet-121", "4xp100-sxm-16g", 192),
    families.NASNET.workload("nasnet-a", "4xrtx4090-24g", 32),
    families.EFFICIENTNET.workload("efficientnet-b4", "2xl4-24g+rtx4090-24g", 48),
    families.HRNET.workload("hrnet-w32", "8xp100-sxm-16g", 128),
    families.RETINANET.workload("retinanet-50", "3xp100-sxm-16g", 32),
    families.UNET.workload("unet-256", "4xrtx3090-24g", 16),
    families.BERT.workload("bert-large", "8xp100-pcie-16g", 32),
    families.GPT2.workload("gpt2-large", "2xa100-sxm-80g+2xv100-sxm-32g", 8),
    families.T5.workload("t5-base", "2x(4xl4-24g)@25gbit", 32),
    families.VIT.workload("vit-large", "2xh100-sxm-80g", 256),
    families.CLIP.workload("clip-b16", "a100-sxm-80g+2xrtx3090-24g", 256),
    families.DLRM.workload("dlrm", "2xrtx3090-24g+cpu-16core", 8192),
    families.DEEP_SPEECH.workload("deepspeech2", "4xp100-pcie-16g", 256),
    families.ELMO.workload("elmo", "6xv100-sxm-32g", 256),
    families.TREE_LSTM.workload("tree-lstm", "5xp100-sxm-16g", 2048),
)
_WORKLOADS = MappingProxyType({workload.name: workload for workload in _PAPERS + _FURTHER})
