"""GPUs that are not there: a placed step runs as on real ones, with fake tensors, and every access to memory is judged.

Tensors have devices and layouts but no content, so a kernel that is given tensors of two devices fails as it would.
Threads and streams each have a vector clock (C. Fidge, 1988): an event carries the clock of its stream to whoever waits
for it, a queue that of the thread that puts. `RaceError` is raised

- if a kernel or copy touches memory that another thread or stream may still be writing, or reading before a write;
- if memory is freed, so that its own stream uses it again, which another stream that did not record it may still use;
- if an operator has no kernel for CUDA, by the table of kernels that comes with PyTorch.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from gdp.execute import backends, host_executor, plan_executor
from gdp.execute.backends import CpuBackend, CudaBackend
from gdp.models.pytorch import replacements

Clock = dict[str, int]


class RaceError(AssertionError):
    """What a GPU might get wrong."""


class _Storage:
    """A piece of memory: whose it is, and who touched it last and when."""

    def __init__(self, weak: StorageWeakRef, owner: str, device: torch.device, what: str) -> None:
        self.weak, self.owner, self.device, self.what = weak, owner, device, what
        self.is_pinned = False
        self.written: tuple[str, int] | None = None
        self.touched: Clock = {}  # the last time of each
        self.recorded: set[str] = set()


class FakeCuda:
    """Watches all that threads inside `watching` do. `errors` has what was found, also by worker threads."""

    def __init__(self) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.lock = threading.RLock()
        self.clocks: dict[str, Clock] = defaultdict(dict)
        self.storages: dict[int, _Storage] = {}
        self.streams: dict[tuple[int, torch.device], str] = {}  # current, by thread
        self.num_streams = 0
        self.num_calls = self.num_kernels = 0
        self.num_hidden_waits = 0  # copies that hold up the thread that launches them

    # -- clocks ----------------------------------------------------------------------------------------------------

    def thread(self) -> str:
        return threading.current_thread().name

    def stream(self, device: torch.device) -> str:
        """The current stream of this thread on that device."""
        return self.streams.get((threading.get_ident(), device), f"default stream of {device}")

    def join(self, waiting: str, clock: Clock) -> None:
        own = self.clocks[waiting]
        for name, time in clock.items():
            own[name] = max(own.get(name, 0), time)

    def launch(self, stream: str) -> None:
        """What this thread launches on that stream begins after all that the thread knows to be done."""
        self.join(stream, self.clocks[self.thread()])

    # -- memory ----------------------------------------------------------------------------------------------------

    def storage(self, tensor: Tensor, owner: str, what: str) -> _Storage:
        memory = tensor.untyped_storage()
        known = self.storages.get(memory._cdata)
        if known is None:
            known = self.storages[memory._cdata] = _Storage(StorageWeakRef(memory), owner, tensor.device, what)
        return known

    def touch(self, actor: str, tensor: Tensor, what: str, *, writes: bool) -> None:
        known, clock = self.storage(tensor, actor, what), self.clocks[actor]
        others = known.touched.items() if writes else [known.written] if known.written else []
        for other, time in others:
            if other != actor and clock.get(other, 0) < time:
                raise RaceError(f"{what} on {actor} {'writes' if writes else 'reads'} what {other} may still be at")
        clock[actor] = clock.get(actor, 0) + 1
        known.touched[actor] = clock[actor]
        if writes:
            known.written = actor, clock[actor]

    def sweep(self) -> None:
        """Judge what was freed since the last look."""
        for address, known in list(self.storages.items()):
            if not known.weak.expired():
                continue
            del self.storages[address]
            if known.device.type == "cpu":
                continue  # of the host's threads; pinned memory waits for its copies by itself
            clock, host = self.clocks[known.owner], self.clocks[self.thread()]  # who frees it launches what comes next
            for other, time in known.touched.items():
                is_known = max(clock.get(other, 0), host.get(other, 0)) >= time
                if other != known.owner and other not in known.recorded and not is_known:
                    raise RaceError(f"what {known.what} made on {known.owner} is freed, {other} may still be at it")

    # -- what stands for CUDA's --------------------------------------------------------------------------------------

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put streams, events, queues and backends in place of the real ones."""
        world = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.device, self.name = device, f"stream {world.num_streams} of {device}"
                world.num_streams += 1

            def wait_event(self, event: "Event") -> None:
                with world.lock:
                    world.launch(self.name)
                    world.join(self.name, event.clock)

            def synchronize(self) -> None:
                with world.lock:
                    world.join(world.thread(), world.clocks[self.name])
                    world.sweep()

        class Event:
            clock: Clock

            def __init__(self, enable_timing: bool = False) -> None:
                self.clock = {}

            def record(self, stream: Stream) -> None:
                with world.lock:
                    world.launch(stream.name)
                    self.clock = dict(world.clocks[stream.name])

            def synchronize(self) -> None:
                with world.lock:
                    world.join(world.thread(), self.clock)

            def elapsed_time(self, _other: "Event") -> float:
                return 1.0

        class Queue:
            def __init__(self) -> None:
                self._items: SimpleQueue[Any] = SimpleQueue()

            def put(self, item: Any) -> None:
                with world.lock:
                    clock = world.clocks[world.thread()]
                    clock[world.thread()] = clock.get(world.thread(), 0) + 1
                    self._items.put((item, dict(clock)))

            def get(self, timeout: float | None = None) -> Any:
                item, clock = self._items.get(timeout=timeout)
                with world.lock:
                    world.join(world.thread(), clock)
                return item

        @contextlib.contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            key = threading.get_ident(), chosen.device
            before = world.streams.get(key)
            world.streams[key] = chosen.name
            try:
                yield
            finally:
                if before is None:
                    del world.streams[key]
                else:
                    world.streams[key] = before

        def current_stream(device: torch.device) -> Stream:
            made = Stream(device)
            made.name = world.stream(device)
            return made

        def record_stream(tensor: Tensor, chosen: Stream) -> None:
            with world.lock:
                world.storage(tensor, chosen.name, "memory").recorded.add(chosen.name)

        def pin_memory(tensor: Tensor) -> Tensor:
            pinned = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
            return pinned.copy_(tensor)

        def copy_(memory: Tensor, content: Tensor, non_blocking: bool = False) -> Tensor:
            copied: Tensor = torch.ops.aten.copy_.default(memory, content, non_blocking)  # the method asks the driver
            return copied

        def gradients(run: Callable[..., Any], inputs: list[Tensor], given: list[Tensor | None]) -> list[Tensor]:
            run(*inputs)  # autograd itself asks the driver
            return [torch.zeros_like(tensor) for tensor in inputs]

        def lstm(steps: Tensor, states: list[Tensor], *_rest: Any) -> tuple[Tensor, ...]:
            hidden = states[0].shape[-1]  # so does the composite of cuDNN's kernels
            return steps.new_empty(*steps.shape[:2], hidden), states[0].clone(), states[1].clone()

        def watched(backend_type: type[Any]) -> type[Any]:
            class Watched(backend_type):  # type: ignore[misc]
                @contextlib.contextmanager
                def active(self) -> Iterator[None]:
                    with super().active(), world.watching():
                        yield

            return Watched

        for name, stand_in in {
            "Stream": Stream,
            "Event": Event,
            "stream": stream,
            "current_stream": current_stream,
            "device": lambda _device: contextlib.nullcontext(),
            "default_generators": [torch.Generator()] * 8,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        generator = torch.Generator
        monkeypatch.setattr(FakeTensorMode, "in_kernel_invocation", _OfEachThread())
        monkeypatch.setattr(torch, "lstm", lstm)
        monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
        monkeypatch.setattr(Tensor, "record_stream", record_stream)
        monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(Tensor, "copy_", copy_)
        monkeypatch.setattr(Tensor, "flip", lambda tensor, dim: torch.ops.aten.flip.default(tensor, [dim]))
        monkeypatch.setattr(replacements, "_gradients", gradients)
        for module in (host_executor, plan_executor):
            monkeypatch.setattr(module, "SimpleQueue", Queue)
        monkeypatch.setattr(backends, "CudaBackend", watched(CudaBackend))
        monkeypatch.setattr(backends, "CpuBackend", watched(CpuBackend))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Judge what this thread does in here; tensors are fake."""
        with self.fake, _Watch(self):
            yield


class _OfEachThread:
    """A flag of a fake mode, for each thread apart: while it is set, fake tensors say that they are on meta."""

    def __init__(self) -> None:
        self._modes = threading.local()

    def __get__(self, mode: FakeTensorMode | None, _class: type | None = None) -> bool:
        return bool(vars(self._modes).get(id(mode), False))

    def __set__(self, mode: FakeTensorMode, is_inside: bool) -> None:
        vars(self._modes)[id(mode)] = is_inside


class _Watch(TorchDispatchMode):
    def __init__(self, world: FakeCuda) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        world, kwargs = self.world, dict(kwargs or {})
        is_pinned = bool(kwargs.pop("pin_memory", False))
        with world.lock:
            if func is torch.ops.aten._local_scalar_dense.default:
                world.touch(world.thread(), args[0], "reading a number", writes=False)
                return 1  # fake tensors hold nothing
            world.num_calls += 1
            if world.num_calls % 20 == 0:  # each time would take most of the time
                world.sweep()
            try:
                result = func(*args, **kwargs)  # of fake tensors: fails if their devices differ
            except RuntimeError as error:
                if "not linked with support for cuda" not in str(error):
                    raise
                result = _shaped_as_on_cpu(func, args, kwargs)
            if func.is_view or func in _NO_KERNEL:
                return result
            _judge(world, func, args, kwargs, result, is_pinned=is_pinned)
            return result


_NO_KERNEL = {torch.ops.prim.device.default, torch.ops.aten.record_stream.default}


def _judge(world: FakeCuda, func: OpOverload, args: Any, kwargs: Any, result: Any, *, is_pinned: bool) -> None:
    what, host = func._schema.name.removeprefix("aten::"), world.thread()
    given, made = list(_tensors((args, kwargs))), list(_tensors(result))
    gpus = sorted({tensor.device for tensor in (*given, *made) if tensor.device.type == "cuda"}, key=str)
    is_copy = what in ("copy_", "_to_copy")
    if len(gpus) > 1 and not is_copy:
        raise RaceError(f"{what} has tensors on {gpus}")
    actor = host
    if gpus:
        source = [tensor.device for tensor in given[::-1] if tensor.device.type == "cuda"]  # of copy_, the second
        actor = world.stream(source[0] if is_copy and source else gpus[0])
        if not has_cuda_kernel(func):
            raise RaceError(f"{what} has no kernel for CUDA")
        world.num_kernels += 1
        world.launch(actor)
    if len(gpus) > 1:  # PyTorch's copy waits for the current stream of the other GPU, which waits for the copy
        world.join(actor, world.clocks[world.stream(given[0].device)])
    written = {id(tensor) for tensor in _written(func, args, kwargs)}
    for tensor in given:
        world.touch(actor, tensor, what, writes=id(tensor) in written)
    for tensor in made:
        if tensor.untyped_storage()._cdata not in world.storages:
            owner = world.stream(tensor.device) if tensor.device.type == "cuda" else host
            world.storage(tensor, owner, what).is_pinned = is_pinned
            world.touch(actor, tensor, what, writes=True)
    if len(gpus) > 1:
        world.join(world.stream(given[0].device), world.clocks[actor])
    crosses = gpus and any(tensor.device.type == "cpu" and (is_copy or tensor.dim()) for tensor in (*given, *made))
    if crosses:
        is_async = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        ends = [world.storages[tensor.untyped_storage()._cdata] for tensor in (*given, *made)]
        is_staged = is_copy and len(given) > 1 and given[0].stride() != given[1].stride()  # by PyTorch, unpinned
        if not is_async or is_staged or any(end.device.type == "cpu" and not end.is_pinned for end in ends):
            world.num_hidden_waits += 1
            world.join(host, world.clocks[actor])


def _shaped_as_on_cpu(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """What `func` would make on the GPU of its arguments, found on the CPU: some fake kernels ask for the driver."""
    (device,) = {tensor.device for tensor in _tensors((args, kwargs))}  # or they would have failed anyway

    def to(place: torch.device) -> Callable[[Any], Any]:
        return lambda item: (
            torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=place)
            if isinstance(item, Tensor)
            else item
        )

    assert not list(_written(func, args, kwargs))
    here_args, here_kwargs = tree_map(to(torch.device("cpu")), (args, kwargs))
    return tree_map(to(device), func(*here_args, **here_kwargs))


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, dict):
        yield from _tensors(list(item.values()))
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from _tensors(part)


def _written(func: OpOverload, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only else args[position] if position < len(args) else ()
            yield from _tensors(value)


@cache
def has_cuda_kernel(func: OpOverload) -> bool:
    """Whether PyTorch's table of native functions has a kernel for CUDA, or one for all devices."""
    schema = func._schema
    name = schema.name.removeprefix("aten::") + (f".{schema.overload_name}" if schema.overload_name else "")
    entry = _native_functions().get(name)
    if entry is None:
        return not schema.name.startswith("aten::")
    if "structured_delegate" in entry:
        entry = _native_functions()[entry["structured_delegate"]]
    if "ufunc_inner_loop" in entry:  # made for CPU and CUDA of one loop
        return True
    dispatch = entry.get("dispatch")
    keys = {key.strip() for names in dispatch or () for key in names.split(",")}
    return dispatch is None or any(key == "CUDA" or key.startswith("Composite") for key in keys)


@cache
def _native_functions() -> dict[str, dict[str, Any]]:
    table = resources.files("torchgen") / "packaged/ATen/native/native_functions.yaml"
    loader: Callable[..., Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {entry["func"].partition("(")[0]: entry for entry in yaml.load(table.read_text(), loader)}
