"""Profiler traces: times of the ops of a captured step, from what torch.profiler's `export_chrome_trace` writes.

    ProfilerStep#3, Optimizer.step#Adam.step     ranges on the host
      aten::linear > aten::addmm                 CPU ops, nested: the outermost one that the graph has is its op
        cudaLaunchKernel -> sgemm_128x64         launches; `correlation` leads to the kernels on the card

An op takes the time of its kernels and of the gaps behind them, or where a trace has none that of its CPU op. They
belong together by kind and the tensors that they read. A step that has as many such CPU ops as the graph, or a
multiple, has them in the graph's order, which tells calls apart whose other arguments differ; else equal calls take all
of their times. Optimizers treat many parameters in a kernel: updates share the time of `Optimizer.step` by their
bytes."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gdp import files
from gdp.errors import InputError, prefixed
from gdp.graph.shapes import parsed_calls
from gdp.models.measured_times import OpTime
from gdp.models.pytorch.program import Program
from gdp.models.pytorch.signature import signatures

_KERNELS, _LAUNCHES = {"kernel", "gpu_memcpy", "gpu_memset"}, {"cuda_runtime", "cuda_driver"}
_CPU_OP, _RANGE, _STEP, _UPDATE = "cpu_op", "user_annotation", "ProfilerStep#", "Optimizer.step#"
_LONGEST_US = 1e9  # of an event: the sum of a million of them is still an int64 of ns
_TYPES = "float float32,double float64,half float16,long int64,int int32,short int16,signed int8,unsigned uint8"
_DTYPES = dict(pair.split(" ") for pair in _TYPES.split(","))  # by the first word in C++, where PyTorch's differs

_ATTENTION, _NORM = "aten._scaled_dot_product_flash_attention_for_cpu", "aten.native_batch_norm"
_AS_CAPTURED = {  # names on cards
    f"{name}{end}": f"{own}{end}"
    for own, names in (
        (_ATTENTION, [f"aten._scaled_dot_product_{how}_attention" for how in ("flash", "efficient", "cudnn")]),
        (_NORM, ["aten.cudnn_batch_norm", "aten.miopen_batch_norm"]),
    )
    for name in names
    for end in ("", "_backward")
}
# tensors that lead in both, of equal sizes: queries, keys and values, behind the gradient of a result
_ALIKE = {_ATTENTION: 3, f"{_ATTENTION}_backward": 4, _NORM: 1, f"{_NORM}_backward": 2}

Key = tuple[str, tuple[str, ...] | None, tuple[str, ...] | None]  # kind, sizes and types of tensors; None: not known


class TraceEvent(NamedTuple):
    """An event with a duration."""

    category: str
    name: str
    thread: str
    start_us: float
    end_us: float
    args: Mapping[str, Any]


class TracedTimes(NamedTuple):
    """The times of ops by signature, and what a trace has beside them."""

    op_times: list[OpTime]
    num_matched: int
    unmatched: Counter[str]  # ops that do something and have no time, by kind
    total_us: float
    rest_us: Mapping[str, float]  # of kernels (CPU ops) that belong to no op, by name


class ProfilerTrace:
    """The file `path`. InputError, with the file and the remedy, if it is no trace with kernels or CPU ops."""

    def __init__(self, path: str | Path) -> None:
        document = files.read_json(path)
        with prefixed(path):
            events = list(_events(document))
            kernels = [event for event in events if event.category in _KERNELS]
            known = set().union(*(_ids(event) for event in events if event.category not in _KERNELS))
            # others were launched before the trace began, by a step that was still running
            self.kernels = [kernel for kernel in kernels if not known.isdisjoint(_ids(kernel))] or kernels
            host = [event for event in events if event.category in {_CPU_OP, _RANGE} | _LAUNCHES]
            self._host = sorted(host, key=lambda event: (event.thread, event.start_us, -event.end_us))
            if not any(event.category == _CPU_OP for event in host):
                raise InputError("has no CPU ops, which say what kernels are for; profile with ProfilerActivity.CPU")
        properties = document.get("deviceProperties")
        first = properties[0] if isinstance(properties, list) and properties else None
        self.card = str(first.get("name", "")) if isinstance(first, dict) and self.kernels else ""
        self.has_sizes = any("Input Dims" in event.args for event in host)
        self.steps = sorted((event.start_us, event.end_us) for event in host if event.name.startswith(_STEP))

    def times(self, program: Program, gap_ns: float = 0) -> TracedTimes:
        """Returns the times that the ops of a step have in the trace; each kernel of an op also takes `gap_ns`, which
        pass on the card before the next one."""
        graph, names, has_sizes = program.graph, signatures(program), self.has_sizes
        slots = defaultdict[Key, list[tuple[int, int]]](list)  # calls, as (op, place), that such CPU ops are
        active = ((graph.flops > 0) | (graph.bytes_accessed > 0)).nonzero()[0].tolist()
        calls_of = {op: () if op in program.updated else parsed_calls(graph.shapes[op]) for op in active}
        for op, calls in calls_of.items():
            for place, call in enumerate(calls):
                kind, arrays = call.kind.rstrip("_"), [array for array in call.arrays if array.size]
                sizes = tuple(str(list(array.size)) for array in arrays)
                for types in (tuple(array.dtype for array in arrays), None) if has_sizes else (None,):
                    slots[_as_captured(kind, sizes if has_sizes else None, types)].append((op, place))
            if op in program.updated:
                slots[_UPDATE, None, None].append((op, 0))
        by_step, rest_us = self._outermost(slots, gap_ns / 1e3)
        samples_us = defaultdict[tuple[int, int], list[float]](list)
        for (_, key), times_us in by_step.items():
            own = slots[key]
            if key[0] == _UPDATE:
                bytes_accessed = [int(graph.bytes_accessed[op]) for op, _ in own]
                for slot, size in zip(own, bytes_accessed, strict=True):
                    samples_us[slot].append(sum(times_us) * size / (sum(bytes_accessed) or 1))
            elif len(times_us) % len(own) == 0 or has_sizes:
                for number, slot in enumerate(own):
                    samples_us[slot] += times_us if len(times_us) % len(own) else times_us[number :: len(own)]
        by_signature = defaultdict[str, list[int]](list)
        for op, calls in calls_of.items():
            of_calls = (samples_us[op, place] for place in range(max(len(calls), 1)))
            times_ns = [round(sum(parts) * 1e3) for parts in zip(*of_calls, strict=False)]
            by_signature[names[op]] += filter(None, times_ns)  # an op without kernels takes the model's time
        unmatched = Counter(graph.kinds[op] for op in active if not by_signature[names[op]])
        known = [OpTime.of(signature, times_ns) for signature, times_ns in by_signature.items() if times_ns]
        of_kernels_us = sum(kernel.end_us - kernel.start_us for kernel in self.kernels)
        total_us = of_kernels_us or sum(map(sum, by_step.values())) + sum(rest_us.values())
        return TracedTimes(known, len(active) - unmatched.total(), unmatched, total_us, rest_us)

    def _outermost(
        self, keys: Container[Key], gap_us: float
    ) -> tuple[dict[tuple[int, Key], list[float]], dict[str, float]]:
        """Returns the times in us of the outermost events with these keys, by step and key, and other times by name.
        Kernels of these events take `gap_us` more."""
        owners: list[tuple[float, int, Key]] = []  # when it starts, its step, its key
        times_us = defaultdict[int | str, float](float)  # by owner; by name of what has none
        launched: dict[tuple[str, str], int] = {}
        stack: list[tuple[TraceEvent, int, int | str]] = []  # open events, their owner, that of a CPU op's time
        for event in self._host:
            while stack and (stack[-1][0].thread != event.thread or stack[-1][0].end_us <= event.start_us):
                stack.pop()
            owner, around = stack[-1][1:] if stack else (-1, "")
            step, key = bisect_right(self.steps, (event.start_us, float("inf"))) - 1, _key(event)
            is_inside = step >= 0 and event.start_us < self.steps[step][1]
            if owner < 0 and key is not None and key in keys and (is_inside or not self.steps):
                owner = len(owners)
                owners.append((event.start_us, step if key[0] != _UPDATE or self.steps else owner, key))
            if stack or event.category not in _LAUNCHES:
                name = "correlation" if event.category in _LAUNCHES else "External id"
                launched[name, str(event.args.get(name))] = owner
            if event.category == _CPU_OP:
                inside, own = around, owner if owner >= 0 else event.name
                if not self.kernels:  # a CPU op's time has that of those inside it
                    times_us[own] += event.end_us - event.start_us
                    times_us[inside] -= event.end_us - event.start_us if inside != "" else 0
                around = own
            stack.append((event, owner, around))
        for kernel in self.kernels:
            owner = next((launched[item] for item in _ids(kernel) if item in launched), -1)
            own_gap_us = gap_us if owner >= 0 else 0.0
            times_us[owner if owner >= 0 else kernel.name] += kernel.end_us - kernel.start_us + own_gap_us
        by_step = defaultdict[tuple[int, Key], list[float]](list)
        for _, number in sorted((start, number) for number, (start, *_) in enumerate(owners)):
            by_step[owners[number][1:]].append(times_us[number])
        return by_step, {name: time for name, time in times_us.items() if isinstance(name, str) and time > 0}


def _events(document: Any) -> Iterator[TraceEvent]:
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise InputError("is no trace (traceEvents); torch.profiler's export_chrome_trace writes one")
    for number, event in enumerate(events):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        category, name, args = event.get("cat"), event.get("name"), event.get("args", {})
        for key, most in (("ts", 1e18), ("dur", _LONGEST_US)):
            if type(value := event.get(key, "")) not in (int, float) or not 0 <= value <= most:
                expected = f"a number of microseconds up to {most:,.0f} is expected"
                raise InputError(f"traceEvents[{number}]: {key} is {files.brief(value)}; {expected}")
        if isinstance(category, str) and isinstance(name, str) and isinstance(args, dict):
            thread = f"{event.get('pid')} {event.get('tid')}"
            yield TraceEvent(category, name, thread, event["ts"], event["ts"] + event["dur"], args)


def _ids(event: TraceEvent) -> list[tuple[str, str]]:
    """Returns the numbers by which kernels, their launches and CPU ops are known to each other."""
    return [(name, str(event.args[name])) for name in ("correlation", "External id") if name in event.args]


def _key(event: TraceEvent) -> Key | None:
    """Returns the key of a CPU op or of an optimizer's step; captures choose whether a call writes in place."""
    if event.category != _CPU_OP:
        return (_UPDATE, None, None) if event.name.startswith(_UPDATE) else None
    kind = event.name.replace("::", ".").rstrip("_")
    sizes, types = event.args.get("Input Dims"), event.args.get("Input type")
    if not isinstance(sizes, list):
        return _as_captured(kind, None, None)
    read = [place for place, size in enumerate(sizes) if isinstance(size, list) and size]
    lists = ([size] if not isinstance(size[0], list) else size for size in (sizes[place] for place in read))
    texts = [str(size) for tensors in lists for size in tensors if size]
    if not isinstance(types, list) or len(types) != len(sizes) or len(texts) != len(read):  # lists have no type here
        return _as_captured(kind, tuple(texts), None)
    names = (str(types[place]).removeprefix("c10::").lower() for place in read)  # c10::BFloat16 is bfloat16
    return _as_captured(kind, tuple(texts), tuple(_DTYPES.get(name.split(" ")[0], name) for name in names))


def _as_captured(kind: str, sizes: tuple[str, ...] | None, types: tuple[str, ...] | None) -> Key:
    """Returns the key of an op by the name that captures, on a CPU, have for it, with the tensors that both have."""
    kind = _AS_CAPTURED.get(kind, kind)
    count = _ALIKE.get(kind)
    return kind, sizes and sizes[:count], types and types[:count]
