"""Adapters of LoRA in a module, as peft 0.17 computes them, beside weights in the model's type or in NF4.

    x --A--> [.., rank] --B--> * alpha / rank --+--> y        A and B are trained in the type of the weights:
    '--frozen weight (NF4: dequantised)--------'              `--precision` says whether float32 copies are kept

peft keeps A and B in float32 and casts them under autocast: 4 bytes of weight and 4 of gradient. In mixed precision
they are here bf16 with bf16 gradients and a float32 copy, the same 16 bytes a parameter with Adam's moments, without
the casts. NF4 is that of bitsandbytes' `Linear4bit`, which dequantises the weight for the product of each pass
(`MatMul4Bit`): float32 constants of 64 weights from 8 bits, then the weights, in a kernel each. What FSDP shards are
the packed weights; the constants, 0.127 bits a weight, are whole in each replica."""

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from gdp.errors import InputError
from gdp.models.lora import Lora

_BLOCK, _OUTER_BLOCK = 64, 256  # weights of a constant, constants of an outer one: arXiv 2305.14314, section 3
_SHOWN = 6  # paths of linear layers in a message


def adapted(model: Any, lora: Lora, name: str) -> Any:
    """Freezes `model` and gives its linear layers adapters, in place. InputError, with `name`, if none is a target."""
    layers = _linear_layers(model)
    repeated = {path: layer for path, layer in layers.items() if re.search(r"(^|\.)\d+\.", path)} or layers
    chosen = repeated if not lora.targets else {p: each for p, each in layers.items() if re.search(lora.targets, p)}
    if not chosen:
        paths = dict.fromkeys(re.sub(r"\.\d+\.", ".0.", path) for path in layers)
        known = ", ".join(list(paths)[-_SHOWN:]) or "none"
        why = f"targets={lora.targets} matches no linear layer" if lora.targets else "there are no linear layers"
        raise InputError(f"--lora: {why} of {name}; known: {known}")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in dict.fromkeys(chosen.values()):
        _adapt(layer, lora)
    return model


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the linear layers by path, but for the one that makes logits, and one whose weight attention reads."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)
    outputs = head()
    inner = nn.modules.linear.NonDynamicallyQuantizableLinear
    linear = [x for x in model.named_modules() if isinstance(x[1], nn.Linear) or _is_transposed(x[1])]
    return {path: part for path, part in linear if part is not outputs and type(part) is not inner}


def _is_transposed(layer: nn.Module) -> bool:
    """Returns whether a layer is GPT-2's, whose weight is [in, out]."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def _adapt(layer: Any, lora: Lora) -> None:
    """Turns a linear layer into one with adapters; it stays one of its class."""
    weight = layer.weight
    fan_out, fan_in = reversed(weight.shape) if _is_transposed(layer) else weight.shape
    cls = type(layer)
    base = (_DequantisedLinear, cls) if lora.is_quantised else (cls,)
    layer.__class__ = type(f"Lora{cls.__name__}", (_WithAdapter, *base), {})
    layer.lora_scale = lora.alpha / lora.rank
    layer.lora_A = nn.Parameter(weight.new_empty((lora.rank, fan_in)))
    layer.lora_B = nn.Parameter(weight.new_zeros((fan_out, lora.rank)))
    nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5))
    if lora.is_quantised:
        layer.unpacked = (fan_out, fan_in), weight.dtype
        count = math.ceil(weight.numel() / _BLOCK)
        options = {"dtype": torch.uint8, "device": weight.device}
        layer.weight = nn.Parameter(torch.empty((-(-weight.numel() // 2), 1), **options), requires_grad=False)
        layer.register_buffer("absmax", torch.empty(count, **options))
        layer.register_buffer("absmax_outer", torch.empty(math.ceil(count / _OUTER_BLOCK), device=weight.device))
        layer.register_buffer("offset", torch.empty((), device=weight.device))


class _WithAdapter(nn.Module):
    """Computes what a linear layer does, and adds its adapter."""

    lora_A: Tensor  # noqa: N815 - as peft names them
    lora_B: Tensor  # noqa: N815
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        product = nn.functional.linear(nn.functional.linear(x, self.lora_A), self.lora_B)
        return result + product * self.lora_scale


class _DequantisedLinear(nn.Module):
    """A linear layer with its weight in NF4, [out, in]."""

    unpacked: tuple[tuple[int, int], torch.dtype]

    def forward(self, x: Tensor) -> Tensor:
        constants = self.absmax, self.absmax_outer, self.offset
        result: Tensor = _DequantisedProduct.apply(x, self.bias, self.weight, constants, *self.unpacked)  # type: ignore[no-untyped-call]
        return result


class _DequantisedProduct(torch.autograd.Function):
    """Linear with a weight that is dequantised in each pass, and has no gradient."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, bias: Tensor | None, weight: Tensor, constants: Any, size: Any, dtype: Any
    ) -> Tensor:
        context.packed = weight, constants, size, dtype
        return nn.functional.linear(x, _unpacked(*context.packed), bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.matmul(_unpacked(*context.packed)), None, None, None, None, None


def _unpacked(weight: Tensor, constants: tuple[Tensor, Tensor, Tensor], size: list[int], dtype: torch.dtype) -> Tensor:
    absmax, outer, offset = constants
    inner = torch.ops.gdp.dequantize_blockwise(absmax, outer) + offset
    unpacked: Tensor = torch.ops.gdp.dequantize_4bit(weight, inner, size, dtype)
    return unpacked


@torch.library.custom_op("gdp::dequantize_blockwise", mutates_args=())
def _blockwise(absmax: Tensor, outer: Tensor) -> Tensor:
    """Stands for the kernel of bitsandbytes: float32 constants from 8 bits."""
    raise NotImplementedError("NF4 weights are dequantised by kernels of bitsandbytes")


@torch.library.custom_op("gdp::dequantize_4bit", mutates_args=())
def _four_bit(weight: Tensor, absmax: Tensor, size: list[int], dtype: torch.dtype) -> Tensor:
    """Stands for the kernel of bitsandbytes."""
    raise NotImplementedError("NF4 weights are dequantised by kernels of bitsandbytes")


@_blockwise.register_fake
def _(absmax: Tensor, outer: Tensor) -> Tensor:
    return absmax.new_empty(absmax.shape, dtype=torch.float32)


@_four_bit.register_fake
def _(weight: Tensor, absmax: Tensor, size: list[int], dtype: torch.dtype) -> Tensor:
    return weight.new_empty(size, dtype=dtype)
