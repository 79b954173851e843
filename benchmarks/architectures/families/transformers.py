"""Encoders, decoders, encoder-decoders and mixtures of experts, of blocks with drawn sublayers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from benchmarks.architectures.families.feeds import CAUSAL_FEEDS, FEEDS, DrawnFeedForward, ExpertFeed, ExpertPlan
from benchmarks.architectures.families.mixers import CAUSAL_MIXERS, MIXERS, WINDOWS, DrawnAttention, mixer
from benchmarks.architectures.families.parts import ClassLoss, Draws, Example, RandomDropout, vector_norm

CROSS, EXPERTS = "cross", "experts"
_OPS_OF: Mapping[str, int] = MappingProxyType(
    {
        "fused": 40,
        "explicit": 52,
        "biased": 56,
        "few_keys": 46,
        "linear": 56,
        "window": 50,
        CROSS: 46,
        "tokens": 22,
        "convolution": 24,
        "pool": 10,
        "gate": 34,
        "plain": 18,
        "gated": 24,
        "squared": 20,
        "local": 34,
        "deep": 27,
        "parallel": 34,
    }
)
"""About as many ops as a step has for each sublayer."""
_FORMS = ("mf", "fmf", "mmf", "mff", "fm")


@dataclass(frozen=True, slots=True)
class TransformerPlan:
    """The sizes of a stack and its kinds of blocks, which take turns; each is a sequence of sublayers."""

    blocks: tuple[tuple[str, ...], ...]
    experts: ExpertPlan
    norm: str
    order: str  # of the norm: "before" or "after" a sublayer, "both"; "scaled": a learned scale of 0 instead
    act: str
    shared: int  # so many blocks in a row have the same weights
    is_parallel: bool  # all sublayers of a block read its input
    has_long_skips: bool  # the second half adds the inputs of the first half, in reverse
    is_causal: bool
    width: int
    num_heads: int
    inner: int
    dropout: float

    @classmethod
    def draw(cls, draws: Draws, *, is_causal: bool = False) -> "TransformerPlan":
        """Draws one to three kinds of blocks of two or three sublayers."""
        mixers = draws.some(CAUSAL_MIXERS if is_causal else MIXERS, draws.number(1, 2))
        feeds = draws.some(CAUSAL_FEEDS if is_causal else FEEDS, draws.number(1, 2))
        blocks = tuple(
            tuple(draws.one_of(*(mixers if letter == "m" else feeds)) for letter in draws.one_of(*_FORMS))
            for _ in range(draws.number(1, 3))
        )
        num_heads, head = draws.one_of(4, 6, 8, 12, 16), draws.one_of(32, 48, 64)
        return cls(
            blocks,
            ExpertPlan.draw(draws),
            draws.one_of("layer", "rms"),
            draws.one_of("before", "after", "both", "scaled"),
            draws.one_of("relu", "gelu", "silu", "tanh"),
            draws.one_of(1, 1, 1, 2, 3),
            draws.chance(0.3),
            draws.chance(0.3),
            is_causal,
            num_heads * head,
            num_heads,
            num_heads * head * draws.number(1, 4),
            draws.one_of(0.0, 0.1),
        )

    def with_memory(self, draws: Draws) -> "TransformerPlan":
        """Returns the plan with attention to a memory somewhere in every block."""
        places = [draws.number(0, len(block)) for block in self.blocks]
        pairs = zip(self.blocks, places, strict=True)
        return replace(self, blocks=tuple((*block[:place], CROSS, *block[place:]) for block, place in pairs))

    def with_experts(self, draws: Draws) -> "TransformerPlan":
        """Returns the plan with experts in place of one sublayer of the first kind of blocks."""
        first, place = list(self.blocks[0]), draws.number(0, len(self.blocks[0]) - 1)
        first[place] = EXPERTS
        return replace(self, blocks=(tuple(first), *self.blocks[1:]))

    @property
    def num_ops(self) -> float:
        """About as many ops as a step of one block has, on average over the kinds."""
        around = {"before": 12, "after": 12, "both": 19, "scaled": 9}[self.order]
        ops_of = {**_OPS_OF, EXPERTS: self.experts.num_ops}
        return sum(ops_of[layer] + around for block in self.blocks for layer in block) / len(self.blocks)


class DrawnSublayer(nn.Module):
    """A mixer, feed-forward, experts or attention to a memory, as a term to be added to [batch, steps, width]."""

    def __init__(self, plan: TransformerPlan, kind: str, num_steps: int) -> None:
        super().__init__()
        self.is_cross = kind == CROSS
        width = plan.width
        if kind == EXPERTS:
            self.body: nn.Module = ExpertFeed(plan.experts, width, plan.inner, plan.act)
        elif kind in FEEDS:
            self.body = DrawnFeedForward(kind, width, plan.inner, plan.act)
        elif self.is_cross:
            self.body = DrawnAttention("fused", width, plan.num_heads, num_steps, is_causal=False)
        else:
            self.body = mixer(kind, width, plan.num_heads, num_steps, is_causal=plan.is_causal)
        self.before = vector_norm(plan.norm if plan.order in ("before", "both") else "none", width)
        self.after = vector_norm(plan.norm if plan.order == "both" else "none", width)
        self.scale = nn.Parameter(torch.zeros(1)) if plan.order == "scaled" else None
        self.dropout = RandomDropout(plan.dropout)

    def forward(self, x: Tensor, memory: Tensor | None) -> Tensor:
        x = self.before(x)
        y = self.dropout(self.after(self.body(x, memory) if self.is_cross else self.body(x)))
        return y if self.scale is None else y * self.scale


class SublayerBlock(nn.Module):
    """Sublayers one after the other, or side by side, with residual connections."""

    def __init__(self, plan: TransformerPlan, kinds: Sequence[str], num_steps: int) -> None:
        super().__init__()
        self.is_parallel = plan.is_parallel
        self.sublayers = nn.ModuleList(DrawnSublayer(plan, kind, num_steps) for kind in kinds)
        norm = plan.norm if plan.order == "after" else "none"
        self.norms = nn.ModuleList(vector_norm(norm, plan.width) for _ in (kinds[:1] if plan.is_parallel else kinds))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if self.is_parallel:
            y = x
            for sublayer in self.sublayers:
                y = y + sublayer(x, memory)
            return self.norms[0](y)
        for sublayer, norm in zip(self.sublayers, self.norms, strict=True):
            x = norm(x + sublayer(x, memory))
        return x


class TransformerStack(nn.Module):
    """[batch, steps, width] -> the same shape, with `memory` [batch, others, width] if the plan has one."""

    def __init__(self, plan: TransformerPlan, num_ops: float, num_steps: int) -> None:
        super().__init__()
        self.num_blocks = max(round(num_ops / plan.num_ops), len(plan.blocks))
        self.shared, self.has_long_skips = plan.shared, plan.has_long_skips
        count = -(-self.num_blocks // plan.shared)
        kinds = [plan.blocks[number % len(plan.blocks)] for number in range(count)]
        self.blocks = nn.ModuleList(SublayerBlock(plan, kind, num_steps) for kind in kinds)
        self.norm = vector_norm(plan.norm, plan.width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        inputs: list[Tensor] = []
        for number in range(self.num_blocks):
            inputs.append(x)
            x = self.blocks[number // self.shared](x, memory)
            if self.has_long_skips and number >= (self.num_blocks + 1) // 2:
                x = x + inputs[self.num_blocks - 1 - number]
        return self.norm(x)


class StepEmbeddings(nn.Module):
    """Tokens [batch, steps] or frames [batch, steps, features] -> [batch, steps, width], with learned positions."""

    def __init__(self, inputs: int, width: int, num_steps: int, *, has_tokens: bool, inner: int | None = None) -> None:
        super().__init__()
        self.first = nn.Embedding(inputs, inner or width) if has_tokens else nn.Linear(inputs, inner or width)
        self.second = nn.Linear(inner, width) if inner else nn.Identity()
        self.positions = nn.Parameter(torch.zeros(num_steps, width))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs)) + self.positions


class StackModel(nn.Module):
    """Inputs and classes of steps [batch, steps], or of samples [batch] -> loss."""

    def __init__(self, first: nn.Module, stack: nn.Module, width: int, num_classes: int) -> None:
        super().__init__()
        self.first, self.stack, self.loss = first, stack, ClassLoss(width, num_classes)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        states = self.stack(self.first(inputs))
        return self.loss(states.mean(1) if targets.dim() == 1 else states, targets)


class EncoderDecoder(nn.Module):
    """Sources and targets [batch, steps] -> loss; the decoder reads the encoder's output, or that of both halves."""

    def __init__(
        self, firsts: Sequence[nn.Module], encoders: Sequence[nn.Module], decoders: Sequence[nn.Module], loss: nn.Module
    ) -> None:
        super().__init__()
        self.firsts, self.loss = nn.ModuleList(firsts), loss
        self.encoders, self.decoders = nn.ModuleList(encoders), nn.ModuleList(decoders)

    def forward(self, sources: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        x, y, memories = self.firsts[0](sources), self.firsts[-1](tokens), []
        for encoder in self.encoders:
            x = encoder(x)
            memories.append(x)
        for number, decoder in enumerate(self.decoders):
            y = decoder(y, memories[number - len(self.decoders)])
        return self.loss(y, targets)


def draw_steps(draws: Draws) -> tuple[int, int]:
    """Draws a batch and a number of steps, a multiple of the windows; about as many steps in all."""
    num_steps = draws.size(32, 512, 8 * WINDOWS)
    return draws.size(8192 // num_steps, 32768 // num_steps, 2), num_steps


def _model(draws: Draws, plan: TransformerPlan, num_ops: int) -> Example:
    batch, num_steps = draw_steps(draws)
    has_tokens, is_stepwise = plan.is_causal or draws.chance(0.6), plan.is_causal or draws.chance(0.4)
    inputs = draws.size(1000, 50000, 100) if has_tokens else draws.size(32, 768)
    num_classes = inputs if is_stepwise and has_tokens else draws.size(10, 1000, 1)
    inner = draws.one_of(None, None, 64, 128)
    first = StepEmbeddings(inputs, plan.width, num_steps, has_tokens=has_tokens, inner=inner)
    model = StackModel(first, TransformerStack(plan, num_ops, num_steps), plan.width, num_classes)
    shape = (batch, num_steps)
    data = torch.randint(inputs, shape) if has_tokens else torch.randn(*shape, inputs)
    return model, (data, torch.randint(num_classes, shape if is_stepwise else (batch,))), {}


def build_stack(draws: Draws, num_ops: int, *, is_causal: bool) -> Example:
    """Draws an encoder, or a causal decoder, of about `num_ops` ops, with one batch."""
    return _model(draws, TransformerPlan.draw(draws, is_causal=is_causal), num_ops)


def build_experts(draws: Draws, num_ops: int) -> Example:
    """Draws an encoder or decoder with experts, of about `num_ops` ops, with one batch."""
    return _model(draws, TransformerPlan.draw(draws, is_causal=draws.chance(0.4)).with_experts(draws), num_ops)


def build_encoder_decoder(draws: Draws, num_ops: int) -> Example:
    """Draws an encoder and a decoder, each in one or two parts, of about `num_ops` ops, with one batch."""
    batch, num_steps = draw_steps(draws)
    encoder = TransformerPlan.draw(draws)
    own = TransformerPlan.draw(draws, is_causal=True)
    own = replace(own, width=encoder.width, num_heads=encoder.num_heads, inner=encoder.inner)
    decoder = own.with_memory(draws)
    share, num_parts = float(draws.rng.uniform(0.25, 0.75)), draws.number(1, 2)
    vocabulary = draws.size(1000, 40000, 100)
    firsts = [StepEmbeddings(vocabulary, encoder.width, num_steps, has_tokens=True) for _ in range(draws.number(1, 2))]
    encoders = [TransformerStack(encoder, num_ops * share / num_parts, num_steps) for _ in range(num_parts)]
    decoders = [TransformerStack(decoder, num_ops * (1 - share) / num_parts, num_steps) for _ in range(num_parts)]
    model = EncoderDecoder(firsts, encoders, decoders, ClassLoss(encoder.width, vocabulary))
    sources, tokens, targets = (torch.randint(vocabulary, (batch, num_steps)) for _ in range(3))
    return model, (sources, tokens, targets), {}
