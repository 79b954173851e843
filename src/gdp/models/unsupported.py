"""Kinds of models that captures do not take: known by an `UnsupportedError`, or by the part of PyTorch that fails."""

import traceback

from gdp.errors import user_line

SPARSE = (
    "sparse tensors; give the indices and the values as tensors of their own, with index_select and index_add, or a "
    "dense matrix"
)
NESTED = "nested (jagged) tensors; give padded ones with a mask, or packed rows with offsets for varlen_attn"
QUANTISED = "quantised tensors of torch.ao; give the float module, or hf:DIR for a model with quantised weights"
WRAPPER = "quantised weights of torchao, or other tensors that wrap others; give the model with plain ones"
MKLDNN = "tensors in oneDNN's layouts; leave to_mkldnn out"
SCRIPTED = "modules of torch.jit, whose code is not Python's; give the plain module"
WRAPPED = (
    "modules that are cut over processes already (DDP, FSDP, DTensor); give the plain module: gdp chooses the layout"
)
PACKED = "packed sequences, whose sizes are content; give recurrent layers the padded batch"
LAZY = "lazy modules, whose sizes are known after a first call; give the plain module, such as nn.Linear(64, 8)"

_PLACES = {  # parts of the paths of PyTorch's files, or of a message
    "torch/nested/": NESTED,
    "torch/ao/": QUANTISED,
    "aten._pack_padded_sequence": PACKED,
    "torch/jit/": SCRIPTED,
    "ScriptModule": SCRIPTED,
    "torch/distributed/": WRAPPED,
    "torch/nn/parallel/distributed.py": WRAPPED,
    "For combine_mode='pointwise'": 'associative_scan(combine_mode="pointwise") in a capture; give "generic"',
    "UninitializedParameter": LAZY,
    "UninitializedBuffer": LAZY,
}


class UnsupportedError(Exception):
    """Says that a capture does not take a kind of tensor or module: the kind, and the remedy after a semicolon."""


def unsupported(error: BaseException) -> str | None:
    """Returns `not supported: KIND, FILE line N; REMEDY` for an error of a kind that is known; else None."""
    kind = str(error) if isinstance(error, UnsupportedError) else None
    if kind is None:
        files = [frame.f_code.co_filename.replace("\\", "/") for frame, _ in traceback.walk_tb(error.__traceback__)]
        texts = *files, str(error)
        kind = next((kind for place, kind in _PLACES.items() if any(place in text for text in texts)), None)
    if kind is None:
        return None
    what, _, remedy = kind.partition("; ")
    return f"not supported: {what}{user_line(error)}; {remedy}"
