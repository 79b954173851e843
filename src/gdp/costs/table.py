"""The table of kernels: which rule says what kernels an op is, by its kind. Each rule has its reason.

Kinds of PyTorch begin with `aten.`; those of JAX and ONNX have names of their own, but the shapes of their products are
those of PyTorch's calls. All other ops of theirs are one kernel each, of the class that their name tells.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from gdp.costs.attention import ATTENTION, attention
from gdp.costs.kernels import Kernel, PricedOp, Rule
from gdp.costs.products import PRODUCTS, product

_CLASS_OF_NAME = (  # the first that a kind's name has decides
    ("attention|sdpa", "attention"),
    ("conv", "convolution"),
    ("pool|upsample|interpolate|resize", "pool"),
    ("(?<!ga)mm|matmul|linear|gemm|dot|einsum|baddbmm|addmv|bilinear|_mv$", "product"),
    ("norm", "norm"),
    ("softmax|logsumexp|nll|cross_entropy", "softmax"),
    ("embedding|gather|index|scatter|take|select|sort|topk|unique|nonzero", "gather"),
    ("sum|mean|var|std|amax|amin|argmax|argmin|prod|cumsum|any|all_|reduce", "reduction"),
    ("transpose|permute|contiguous|clone|copy|cat|stack|roll|flip|im2col|col2im", "transpose"),
    ("adam|sgd|optimizer|lamb|adagrad|rmsprop|update", "optimizer"),
)
_PATTERNS = tuple((re.compile(pattern), kind) for pattern, kind in _CLASS_OF_NAME)


def class_of(kind: str) -> str:
    """Returns the class of kernels that an op of this kind is, by its name alone."""
    name = kind.rpartition(".")[2].lower()
    return next((found for pattern, found in _PATTERNS if pattern.search(name)), "pointwise")


def one_kernel(op: PricedOp) -> list[Kernel]:
    """One kernel of the op's FLOPs and bytes: what is not known better."""
    return [Kernel(class_of(op.kind), op.flops, op.bytes)]


RULES: Mapping[str, Rule] = MappingProxyType(
    {**dict.fromkeys(PRODUCTS, product), **dict.fromkeys(ATTENTION, attention)}
)


def rule_of(op: PricedOp) -> tuple[str, Rule]:
    """Returns the rule of an op and its name."""
    rule = RULES.get(op.calls[0].kind.removeprefix("aten."), one_kernel) if op.calls else one_kernel
    return rule.__name__, rule
