"""The cards that PyTorch calls cuda0, cuda1, ...: it knows CUDA_VISIBLE_DEVICES, CUDA's order and AMD's cards."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gdp.cluster.detect.nvml import Gpu

_DEVICES, _DRIVERS = Path("/dev"), ("nvidiactl", "nvhost-gpu", "dxg", "kfd")
"""The files of drivers of NVIDIA's cards, of those in Jetsons and behind WSL, and of AMD's."""

Visible = tuple[dict[str, Gpu], list[str]]
"""The cards by their names in PyTorch, in that order, and notes on omitted ones."""


def visible_cards(cards: Sequence[Gpu]) -> Visible:
    """Returns PyTorch's cards in its order, each with the facts that NVML has of the card with its UUID."""
    if not cards and not any((_DEVICES / name).exists() for name in _DRIVERS):
        return {}, []
    import torch  # a second or two, which machines without cards never need

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
        text = f"{len(cards)} GPUs are left out: PyTorch {torch.__version__} has no CUDA; install a build that has"
        return visible, [text]
    return visible, []
