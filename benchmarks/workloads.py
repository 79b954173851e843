"""The workloads of the benchmarks: the papers', and further models that were chosen for the shapes of their graphs.

Those have branches, towers, long recurrences, shared parameters, skips. Contiguous stages of each fit in its devices,
most models do not fit in a single one. Each is a MODEL from the root of the checkout: densenet-121 is
`benchmarks.workloads:densenet_121`.
"""

import re

from benchmarks.models import families
from benchmarks.models.variants import VARIANTS
from gdp.models.papers import PAPERS, Registry, Workload

FURTHER = (
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
workloads = Registry((*PAPERS.workloads, *FURTHER), (*PAPERS.variants, *VARIANTS), PAPERS.large)


def with_relatives(family: str) -> frozenset[str]:
    """Returns the names of `family` and of its relatives."""
    groups = (names for group in families.RELATIVES if family in (names := {relative.name for relative in group}))
    return frozenset(next(groups, {family}))


def model_of(name: str) -> str:
    """Returns the workload or variant `name` as gdp's MODEL. InputError if there is none."""
    return name if PAPERS.find(workloads.get(name).name) else f"{__name__}:{_attribute(name)}"


def __getattr__(attribute: str) -> Workload:
    for workload in (*FURTHER, *VARIANTS):
        if _attribute(workload.name) == attribute:
            return workload
    raise AttributeError(attribute)


def _attribute(name: str) -> str:
    return re.sub(r"\W", "_", name)
