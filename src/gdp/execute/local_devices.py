"""Local devices: what this machine has to run a plan on, as PyTorch sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gdp.execute.targets import Target, find_targets
from gdp.local import Detected, Machine, detect
from gdp.local.nvml import Gpu
from gdp.local.visible import Visible


@dataclass(frozen=True, slots=True)
class LocalDevice(Detected):
    """A device of this machine."""

    @property
    def target(self) -> Target:
        """Where it runs. InputError if it has gone away."""
        return find_targets([self.name], [self.place])[0]


def detect_local() -> tuple[LocalDevice, ...]:
    """The CUDA devices and `cpu0`, all cores at once; without CUDA a device for each core: `Machine.devices`."""
    return tuple(LocalDevice(item.name, item.kind, item.memory_bytes, item.place) for item in detect_machine().devices)


def detect_machine() -> Machine:
    """This machine with the GPUs that PyTorch can use, also those that NVML does not know, such as AMD's."""
    return detect(_as_pytorch_sees)


def _as_pytorch_sees(cards: Sequence[Gpu]) -> Visible:
    """PyTorch's GPUs in its order, each with what NVML knows of the card with its UUID."""
    known = {card.uuid: card for card in cards if card.uuid and not card.is_mig}
    found = {}
    try:
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            card = known.get(f"GPU-{getattr(properties, 'uuid', '')}") or Gpu(torch.cuda.get_device_name(number))
            if card.total_bytes is None:
                card = replace(card, total_bytes=properties.total_memory)
            found[f"cuda{number}"] = card
    except (RuntimeError, AssertionError) as error:  # a driver that is too old, a card that has failed
        reason = str(error).strip().partition("\n")[0][:200]
        return {}, [f"PyTorch cannot use the GPUs here ({reason})"]
    if cards and torch.version.cuda is None:
        return found, [f"PyTorch {torch.__version__} has no CUDA and sees none of {len(cards)} NVIDIA GPUs here"]
    return found, []
