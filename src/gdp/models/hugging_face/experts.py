"""Experts of classes that Transformers multiplies with every token: as grouped products, as engines run them."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def routed_experts() -> Iterator[None]:
    """Lets Llama 4 multiply each token with the experts that it is sent to alone.

    Transformers 5 multiplies all tokens with all experts, those that are not chosen by zero: 16 to 128 times the work,
    which no engine that serves the model does. The results are the same up to rounding.
    """
    module = sys.modules.get("transformers.models.llama4.modeling_llama4")
    if module is None:
        yield
        return
    layer = module.Llama4TextMoe
    before = layer.forward
    layer.forward = _llama4_forward
    try:
        yield
    finally:
        layer.forward = before


def _llama4_forward(layer: Any, hidden_states: Any) -> tuple[Any, Any]:
    """Returns (the sum of the routed and the shared expert, router logits), as `Llama4TextMoe.forward` does.

    A token's score scales the input of an expert, not its result.
    """
    import torch

    rows = hidden_states.reshape(-1, layer.hidden_dim)
    scores, logits = layer.router(rows)  # 0 for experts that are not chosen
    top, choices = scores.topk(layer.top_k, dim=1)
    experts, order = choices.flatten().sort()
    sizes = torch.histc(experts.float(), bins=layer.num_experts, min=0, max=layer.num_experts - 1)
    ends = sizes.cumsum(0, dtype=torch.int32)
    grouped = (rows.repeat_interleave(layer.top_k, dim=0) * top.reshape(-1, 1))[order]
    gate, up = torch._grouped_mm(grouped, layer.experts.gate_up_proj, offs=ends).chunk(2, dim=-1)
    made = torch._grouped_mm(up * layer.experts.act_fn(gate), layer.experts.down_proj, offs=ends)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    routed = made[places].view(len(rows), layer.top_k, -1).sum(dim=1)
    return layer.shared_expert(rows) + routed, logits
