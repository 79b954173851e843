"""Local devices: the devices of this machine that can run a plan, as PyTorch sees them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gdp.cluster.detect import Detected, Machine, detect
from gdp.cluster.detect.nvml import Gpu
from gdp.cluster.detect.visible import Visible
from gdp.execute.targets import Target, find_targets


@dataclass(frozen=True, slots=True)
class LocalDevice(Detected):
    """A device of this machine."""

    @property
    def target(self) -> Target:
        """Returns the target of the device. InputError if it has gone away."""
        return find_targets([self.name], [self.place])[0]


def detect_local() -> tuple[LocalDevice, ...]:
    """Returns the CUDA devices and `cpu0`, all cores at once; without CUDA a device for each core."""
    return tuple(LocalDevice(item.name, item.kind, item.memory_bytes, item.place) for item in detect_machine().devices)


def detect_machine() -> Machine:
    """Returns this machine with the GPUs that PyTorch can use, including GPUs unknown to NVML (AMD's)."""
    return detect(_as_pytorch_sees)


def _as_pytorch_sees(cards: Sequence[Gpu]) -> Visible:
    """Returns PyTorch's GPUs in its order, each with the facts that NVML has of the card with its UUID."""
    by_uuid = {card.uuid: card for card in cards if card.uuid and not card.is_mig}
    visible = {}
    try:
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            card = by_uuid.get(f"GPU-{getattr(properties, 'uuid', '')}") or Gpu(torch.cuda.get_device_name(number))
            if card.total_bytes is None:
                card = replace(card, total_bytes=properties.total_memory)
            visible[f"cuda{number}"] = card
    except (RuntimeError, AssertionError) as error:  # a driver that is too old, a card that has failed
        reason = str(error).strip().partition("\n")[0][:200]
        return {}, [f"PyTorch cannot use the GPUs here ({reason})"]
    if cards and torch.version.cuda is None:
        return visible, [f"PyTorch {torch.__version__} has no CUDA and sees none of {len(cards)} NVIDIA GPUs here"]
    return visible, []
