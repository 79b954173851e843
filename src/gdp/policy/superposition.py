"""Parameter superposition (feature conditioning): one placer behaves differently on different kinds of graphs.

    x^(l+1) = g^(l)( c(x^(0)) * x^(l) )

x^(0) is the graph representation, g^(l) the l-th layer of the placer, c one extra transformer layer, and `*` is
elementwise (Zhou et al., arXiv 1910.01578, "batch training"). Without it c = 1: a plain `SegmentTransformer`.
"""

from dataclasses import replace

from torch import Tensor, nn

from gdp.policy.placement_network import SegmentTransformer, SegmentTransformerConfig


class Superposition(nn.Module):
    """A `SegmentTransformer` whose layers are conditioned on its input, called like one."""

    def __init__(self, config: SegmentTransformerConfig) -> None:
        super().__init__()
        self.conditioning = SegmentTransformer(replace(config, num_layers=1))
        self.placer = SegmentTransformer(config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The shape of `x`: [N, H], or [B, N, H] padded where `mask` [B, N] is false."""
        out: Tensor = self.placer(x, mask, self.conditioning(x, mask))
        return out
