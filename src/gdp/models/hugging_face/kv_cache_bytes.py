"""The memory of a captured cache: its size, and its bytes where it is kept in another type than the model's."""

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from torch.utils._pytree import tree_leaves

from gdp.models.hugging_face.kv_cache import CacheRoom
from gdp.models.pytorch.capture_step import Capture
from gdp.models.pytorch.program import Program
from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.models.pytorch.strides import StridedLayout
from gdp.models.serving import ServedStep, Serving

_TOKENS = re.compile(r"(?:^|\.)(?:cross_)?(?:key|value|latent|index_key)_cache$")
_STATES = re.compile(r"(?:^|\.)(?:conv|recurrent)_state_cache(?:_\d+)?$")
_INPUTS = ("input.decoder_input_ids", "input.input_ids")


def finish(captured: Capture, serving: Serving, room: CacheRoom, share: Fraction) -> tuple[Capture, ServedStep]:
    """Returns the capture with the cache in the type that `serving` asks for, and the facts of the step. Keys, values
    and latents change their bytes: resident, read, written and sent. States keep the model's type. `share`
    of the whole cache is in the capture."""
    program = captured.program
    caches = [op for op, source in program.sources.items() if any(_TOKENS.search(name) for name in source.views)]
    states = [op for op, source in program.sources.items() if any(_STATES.search(name) for name in source.views)]
    if serving.cache_element_bytes is not None:
        captured = _kept_in(captured, caches, serving.cache_element_bytes)
    sources = {name: layout for source in program.sources.values() for name, layout in source.views.items()}
    names = _INPUTS if serving.phase == "decode" else reversed(_INPUTS)  # a prompt is the encoder's, if there is one
    tokens = next(sources[name] for name in names if name in sources)
    num_sequences, num_tokens = tokens.size
    cache_bytes = int(int(captured.graph.resident_bytes[[*caches, *states]].sum()) / share)
    return captured, ServedStep(serving.phase, num_sequences, num_tokens, room.context, cache_bytes)


def _kept_in(captured: Capture, caches: list[int], element_bytes: Fraction) -> Capture:
    """Returns the capture with this many bytes for an element of the cache."""
    graph, program = captured.graph, captured.program
    resident, accessed = graph.resident_bytes.copy(), graph.bytes_accessed.copy()
    sent = graph.tensor_bytes.copy()
    members: dict[int, Fraction] = {}  # by value in the memory of a cache: the share of its bytes that is left
    for op in caches:
        value = program.tensor_values[program.sources[op].tensor]
        members[value] = element_bytes / program.layouts[value].dtype.itemsize
        resident[op] = math.ceil(int(resident[op]) * members[value])
    for op, calls in enumerate(program.calls):
        saved = Fraction(0)
        for call in calls:
            for value, layout in _distinct(call, program):
                if value in members:
                    saved += _view_bytes(layout) * (1 - members[value])
            for old, new in call.writes:
                if old in members:
                    members[new] = members[old]
        accessed[op] = max(0, math.ceil(int(accessed[op]) - saved))
    for tensor, value in enumerate(program.tensor_values):
        if value in members:
            sent[tensor] = math.ceil(int(sent[tensor]) * members[value])
    changed = replace(graph, resident_bytes=resident, bytes_accessed=accessed, tensor_bytes=sent)
    return replace(captured, graph=changed, program=replace(program, graph=changed))


def _distinct(call: Call, program: Program) -> Iterable[tuple[int, StridedLayout]]:
    """Returns the views that a call reads, each once, as `bytes_accessed` counts them."""
    leaves = tree_leaves((call.args, dict(call.kwargs)))
    refs = dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Ref))
    return [(ref.value, ref.layout or program.layouts[ref.value]) for ref in refs]


def _view_bytes(layout: StridedLayout) -> int:
    sizes = (size for size, stride in zip(layout.size, layout.stride, strict=True) if stride or size == 1)
    return math.prod(sizes) * layout.dtype.itemsize
