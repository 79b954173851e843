"""The table of kernels: which rule says what kernels an op is, by its kind. Each rule has its reason. Kinds of PyTorch
begin with `aten.`; those of JAX and ONNX have names of their own, but the shapes of their products are those of
PyTorch's calls. All other ops of theirs are one kernel each, of the class that their name tells."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from gdp.costs import convolutions, passes
from gdp.costs.attention import ATTENTION, attention
from gdp.costs.collectives import COLLECTIVE, KINDS
from gdp.costs.kernels import Kernel, PricedOp, Rule
from gdp.costs.products import PRODUCTS, RECURRENT, product, recurrent

_CLASS_OF_NAME = (  # the first that a kind's name has decides
    ("^add_any$|^select_n$|^qlinear(?:add|mul|sigmoid|leakyrelu)|quantizelinear", "pointwise"),
    ("attention|varlen_attn|sdpa", "attention"),
    ("conv(?!ert)", "convolution"),
    ("pool|upsample|interpolate|resize", "pool"),
    ("(?<!ga)mm|matmul|linear|gemm|dot|einsum|baddbmm|addmv|bilinear|_mv$", "product"),
    ("norm", "norm"),
    ("softmax|logsumexp|nll|cross_entropy", "softmax"),
    ("rnn_layer|^lstm|^gru|^rnn$", "product"),
    (r"^(?:gather|take|put|scatter(?:_\w+)?)$", "element_gather"),
    ("embedding|gather|index|scatter|take|select|sort|topk|unique|nonzero", "gather"),
    ("sum|mean|var|std|amax|amin|argmax|argmin|prod|cumsum|any|all_|reduce", "reduction"),
    ("transpose|permute|contiguous|clone|copy|cat|stack|roll|flip|im2col|col2im", "transpose"),
    ("adam|adafactor|sgd|optimizer|lamb|adagrad|rmsprop|update", "optimizer"),
)
BATCH_NORMS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
)
_SOFTMAXES = "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"
_EMPTY = re.compile(r"\.(?:new_)?empty(?:_like|_strided)?$")  # calls that launch nothing
_PATTERNS = tuple((re.compile(pattern), kind) for pattern, kind in _CLASS_OF_NAME)


def class_of(kind: str) -> str:
    """Returns the class of kernels that an op of this kind is, by its name alone."""
    name = kind.rpartition(".")[2].lower()
    if kind.startswith(f"{COLLECTIVE}."):
        return COLLECTIVE
    return next((found for pattern, found in _PATTERNS if pattern.search(name)), "pointwise")


def one_kernel(op: PricedOp) -> list[Kernel]:
    """One kernel of the op's FLOPs and bytes: what is not known better."""
    return [Kernel(class_of(op.kind), op.flops, op.bytes)]


def collective(op: PricedOp) -> list[Kernel]:
    """One exchange of the ranks of a group; its buffer is the larger one of what it reads and makes."""
    exchange = KINDS.index(op.kind.removeprefix(f"{COLLECTIVE}."))
    if not op.calls:
        return [Kernel(COLLECTIVE, 0, op.bytes, (exchange,))]
    call = op.calls[0]
    num_bytes = max(map(passes.array_bytes, (*call.arrays[:1], *call.results)))
    num_ranks = call.arguments[1]
    return [Kernel(COLLECTIVE, 0, num_bytes, (exchange, num_ranks if isinstance(num_ranks, int) else 0))]


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(PRODUCTS, product),
        **dict.fromkeys(RECURRENT, recurrent),
        **dict.fromkeys(ATTENTION, attention),
        "convolution": convolutions.convolution,
        "convolution_backward": convolutions.convolution_backward,
        **dict.fromkeys(BATCH_NORMS, passes.batch_norm),
        "native_batch_norm_backward": passes.batch_norm_backward,
        "native_layer_norm": passes.row_norm,
        "native_layer_norm_backward": passes.row_norm_backward,
        "_fused_rms_norm": passes.row_norm,
        "_fused_rms_norm_backward": passes.row_norm_backward,
        "native_group_norm": passes.group_norm,
        "native_group_norm_backward": passes.row_norm_backward,
        **dict.fromkeys(_SOFTMAXES, passes.softmax),
        "sum": passes.column_sum,
        **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), passes.scan),
        **dict.fromkeys(("avg_pool2d", "avg_pool2d_backward"), passes.average_pool),
        "max_pool2d_with_indices_backward": passes.max_pool_backward,
        **dict.fromkeys(("select_backward", "slice_backward", "constant_pad_nd"), passes.filled_and_copied),
        **dict.fromkeys(("optimizer.foreach", "optimizer.fused", "optimizer.for-loop"), passes.optimizer),
    }
)


def rule_of(op: PricedOp) -> tuple[str, Rule]:
    """Returns the rule of an op and its name."""
    if len(op.calls) > 1:
        return "calls", _call_by_call
    rule = _rule_of_call(op) if op.calls or class_of(op.kind) == COLLECTIVE else one_kernel
    return rule.__name__, rule


def _rule_of_call(op: PricedOp) -> Rule:
    if class_of(op.kind) == COLLECTIVE:
        return collective
    is_plain = class_of(op.kind) in ("pointwise", "transpose")
    return RULES.get(op.calls[0].kind.removeprefix("aten."), passes.pointwise if is_plain else one_kernel)


def _call_by_call(op: PricedOp) -> list[Kernel]:
    """Kernels of each call, as of an op that others in its memory have joined; the first has its FLOPs."""
    calls = [call for call in op.calls if not _EMPTY.search(call.kind)] or op.calls[:1]
    num_bytes = [passes.call_bytes(call) for call in calls]
    part = min(op.bytes / max(sum(num_bytes), 1), 1)  # rows of a table, or shapes alone
    kernels: list[Kernel] = []
    for number, call in enumerate(calls):
        flops = 0 if number else op.flops
        one = op._replace(kind=call.kind, flops=flops, bytes=round(part * num_bytes[number]), calls=(call,))
        kernels += _rule_of_call(one)(one)
    return kernels
