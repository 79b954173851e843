"""The built-in workloads: the fourteen of the GDP papers on their numbers of devices. The papers give neither batch
sizes nor hidden sizes. With the batch sizes here the expert's plan fits in 16 GiB P100s, while one P100 holds neither
gnmt-8 nor any Transformer-XL, AmoebaNet or WaveNet. With 80 steps the graph of gnmt-8 has more than 50,000 ops, the
size that the GDP paper claims. A family's file, and PyTorch, is imported when one of its workloads is built."""

from gdp.models.papers import families
from gdp.models.papers.families import VARIANTS
from gdp.models.papers.workload import ExpertRule, Family, Registry, Workload, layer_per_device

__all__ = ["PAPERS", "ExpertRule", "Family", "Registry", "Workload", "layer_per_device"]

_WORKLOADS = (
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
# more than 6,000 ops: an update on one costs as much as on a dozen others, and smaller ones of their families are there
_LARGE = frozenset(("rnnlm-4", "rnnlm-8", "gnmt-2", "gnmt-4", "gnmt-8"))
PAPERS = Registry(_WORKLOADS, VARIANTS, _LARGE)
