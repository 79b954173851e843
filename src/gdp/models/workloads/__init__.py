"""The built-in workloads: the fourteen of the GDP papers on their numbers of devices, and further models on others.

The papers give neither batch sizes nor hidden sizes. With the batch sizes here the expert's plan fits in 16 GiB P100s,
while one P100 holds neither gnmt-8 nor any Transformer-XL, AmoebaNet or WaveNet. With 80 steps the graph of gnmt-8 has
more than 50,000 ops, the size that the GDP paper claims. The further models were chosen for the shapes of their graphs:
branches, towers, long recurrences, shared parameters, skips. Contiguous stages of each fit in its devices, most models
do not fit in a single one.

Beside them there are variants of every family, smaller and larger, to train policies on; they are found by name too.
A family's file is imported when one of its workloads is built: until then PyTorch is not needed.
"""

from collections.abc import Iterable
from types import MappingProxyType

from gdp.errors import InputError, suggest
from gdp.models.workloads import families
from gdp.models.workloads.families import with_relatives
from gdp.models.workloads.variants import training_variants
from gdp.models.workloads.workload import ExpertRule, Family, Workload, layer_per_device

__all__ = [
    "ExpertRule",
    "Family",
    "Workload",
    "family_names",
    "find",
    "further_names",
    "get",
    "hold_out",
    "layer_per_device",
    "names",
    "paper_names",
    "training_set",
    "training_variants",
    "variant_names",
    "with_relatives",
]


def get(name: str) -> Workload:
    """Returns the workload or variant called `name`. InputError if there is none."""
    workload = find(name)
    if workload is None:
        raise InputError(f"workload {name!r} is not built in; one of {', '.join(names())} is expected")
    return workload


def find(name: str) -> Workload | None:
    """Returns the workload or variant called `name`; None if there is none."""
    return _WORKLOADS.get(name) or _VARIANTS.get(name)


def names() -> tuple[str, ...]:
    """Returns the names of all built-in workloads, the papers' first."""
    return tuple(_WORKLOADS)


def paper_names() -> tuple[str, ...]:
    """Returns the names of the fourteen workloads of the GDP papers."""
    return tuple(workload.name for workload in _PAPERS)


def further_names() -> tuple[str, ...]:
    """Returns the names of the models beyond the papers'."""
    return tuple(workload.name for workload in _FURTHER)


def variant_names() -> tuple[str, ...]:
    """Returns the names of all variants, family by family."""
    return tuple(_VARIANTS)


def family_names() -> tuple[str, ...]:
    """Returns the names of the model families, the papers' first."""
    return tuple(dict.fromkeys(workload.family for workload in _WORKLOADS.values()))


def hold_out(families: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of `families` and of their relatives, sorted. InputError for an unknown family."""
    held_out: set[str] = set()
    for family in families:
        if family not in family_names():
            raise InputError(f"family {family!r} is unknown; {suggest(family, family_names())}")
        held_out |= with_relatives(family)
    return tuple(sorted(held_out))


def training_set(held_out: Iterable[str] = ()) -> tuple[Workload, ...]:
    """Returns the workloads to pre-train a policy on: small ones and all variants, without families held out."""
    left_out = frozenset(held_out)
    candidates = (*_WORKLOADS.values(), *_VARIANTS.values())
    return tuple(item for item in candidates if item.family not in left_out and item.name not in _LARGE)


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
_VARIANTS = MappingProxyType({variant.name: variant for variant in training_variants()})
# more than 6,000 ops: an update on one costs as much as on a dozen others, and smaller ones of their families are there
_LARGE = frozenset(("rnnlm-4", "rnnlm-8", "gnmt-2", "gnmt-4", "gnmt-8"))
