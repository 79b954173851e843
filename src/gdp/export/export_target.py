"""ExportTarget: a tool that plans are exported for, with the placements that it can express and its file. A target is
coarser than a plan: it knows modules, layers or stages, not ops. Export units are the smallest parts that it can place;
the same problem has them in place of ops. N ops, U units, D devices. Graphs that a tool cannot run are
refused in one line: of another front end, training steps, micro-batches."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64, Bool
from gdp.cluster.detect.machine import VISIBLE, among_visible
from gdp.cluster.device import host_of
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.shards import Shards
from gdp.models.source import ModelSource
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation
from gdp.units.units import Units

# Kinds of ops that any model has, as the front ends call them and as nobody else does.
_ONNX_KINDS = "Add Cast Concat Conv Gather Gemm LayerNormalization MatMul Mul Relu Reshape Sigmoid Softmax Transpose"
_JAX_KINDS = (
    "broadcast_in_dim conv_general_dilated convert_element_type dot_general integer_pow reduce_max reduce_sum select_n"
)


def origin(graph: Graph) -> str:
    """Returns "PyTorch", "ONNX" or "JAX" by the kinds of the graph's ops; "" for a graph of the user's own."""
    kinds = set(graph.kinds)
    if any(kind.startswith("aten.") for kind in kinds):
        return "PyTorch"
    if kinds.intersection(_ONNX_KINDS.split()) or any("::" in kind for kind in kinds):
        return "ONNX"
    return "JAX" if kinds.intersection(_JAX_KINDS.split()) else ""


def check_modules(graph: Graph, what: str) -> None:
    """Raises InputError for a graph without module paths of PyTorch. The paths in an ONNX file, or of JAX scopes, name
    no module that a tool would find."""
    front_end = origin(graph)
    if front_end in ("ONNX", "JAX"):
        source = "an ONNX file" if front_end == "ONNX" else "a JAX function"
        nodes = ", or export it to onnxruntime or openvino" if front_end == "ONNX" else ""
        raise InputError(
            f"graph {graph.name!r}: its ops are those of {source} and have no {what} of PyTorch; "
            f"capture the PyTorch model itself{nodes}"
        )
    if not any(graph.modules):
        raise InputError(
            f"graph {graph.name!r}: its ops have no module paths, so it has no {what}; capture the PyTorch model itself"
        )


def check_nodes(graph: Graph, target: str) -> None:
    """Raises InputError for a graph of ops that are no nodes of an ONNX file."""
    front_end = origin(graph)
    if front_end in ("PyTorch", "JAX"):
        what = "a PyTorch model" if front_end == "PyTorch" else "a JAX function"
        raise InputError(
            f"{target}: graph {graph.name!r} is that of {what}; {target} places the nodes of an ONNX file, "
            "so place the file itself"
        )


def check_inference(problem: Problem, target: str) -> None:
    """Raises InputError for a training step, which the target's tool does not run."""
    if _is_training(problem):
        raise InputError(
            f"{target}: graph {problem.graph.name!r} is a training step, and {target} runs inference only; "
            "place the model with --inference"
        )


def check_training(problem: Problem, target: str) -> None:
    """Raises InputError for inference, which a tool that trains in layouts does not run."""
    if not _is_training(problem):
        raise InputError(
            f"{target}: graph {problem.graph.name!r} is inference, and {target} trains in layouts; export to vllm, "
            "sglang or tensorrt-llm"
        )


def check_one_batch(problem: Problem, target: str, *, pipelines: bool = True) -> None:
    """Raises InputError for micro-batches, where the target's tool runs one after the other. `pipelines`: whether other
    targets would take the model's modules as stages."""
    count = int(problem.microbatch.max()) + 1
    if count > 1:
        others = f", or take torch-pipelining or {'megatron' if _is_training(problem) else 'vllm'}" if pipelines else ""
        raise InputError(
            f"{target}: graph {problem.graph.name!r} has {count} micro-batches, and {target} runs one after the other, "
            f"not as a pipeline; leave out --microbatches{others}"
        )


def _is_training(problem: Problem) -> bool:
    return not {"backward", "update"}.isdisjoint(problem.graph.phases)


@dataclass(frozen=True, eq=False)
class ExportUnits(Units):
    """The units of a target, each an op or whole groups. Their problem allows the target's devices alone."""

    members: tuple[tuple[str, ...], ...]  # [U] paths of modules, names of layers or ops
    is_chain: bool = False  # in the order of execution; a device takes one contiguous run of them, a stage

    @classmethod
    def build(
        cls,
        problem: Problem,
        labels: npt.ArrayLike,
        names: Sequence[str],
        *,
        joined: Sequence[int] = (),
        devices: Bool | None = None,
    ) -> "ExportUnits":
        """Builds units from `labels` [N], numbers into `names`; a unit's number is that of its first op in order.
        Labels of one group become one unit, and so do the labels of one tree of `joined` [len(names)], a forest that
        `join` makes. `devices` [D] are the devices that the target has."""
        parent = list(joined) or list(range(len(names)))
        label_of = np.asarray(labels, np.int64)
        for ops in grouped_ops(problem):
            for op in ops[1:]:
                join(parent, int(label_of[ops[0]]), int(label_of[op]))
        roots = np.array([find(parent, label) for label in range(len(names))], np.int64)
        used, first, inverse = np.unique(roots[label_of], return_index=True, return_inverse=True)
        by_first_op = np.argsort(first)
        members = [[names[label] for label in np.flatnonzero(roots == root).tolist()] for root in used[by_first_op]]
        return cls._restricted(problem, np.argsort(by_first_op)[inverse], members, devices)

    @classmethod
    def chain(
        cls, problem: Problem, positions: I64, names: Sequence[str], *, devices: Bool | None = None
    ) -> "ExportUnits":
        """Builds a chain from the `positions` [N] of ops along it, numbers into `names`. All positions between the
        members of a group become one unit. Positions without ops are left out."""
        is_cut = np.ones(len(names), np.bool_)  # before each position
        for ops in grouped_ops(problem):
            is_cut[positions[ops].min() + 1 : positions[ops].max() + 1] = False
        unit_at = np.cumsum(is_cut) - 1
        used, index = np.unique(unit_at[positions], return_inverse=True)
        members = [[names[position] for position in np.flatnonzero(unit_at == unit).tolist()] for unit in used]
        return cls._restricted(problem, index, members, devices, is_chain=True)

    @classmethod
    def _restricted(
        cls,
        problem: Problem,
        index: I64,
        members: Sequence[Sequence[str]],
        devices: Bool | None,
        *,
        is_chain: bool = False,
    ) -> "ExportUnits":
        """Leaves the target's `devices` [D]; InputError if none may run one of the units."""
        restricted = problem if devices is None else problem.with_allowed(problem.allowed & devices)
        units = cls(restricted, index.astype(np.int64), tuple(map(tuple, members)), is_chain)
        if not units.allowed.any(axis=1).all():
            unit = int(np.argmin(units.allowed.any(axis=1)))
            runnable = (problem.op_time_ns[units.index == unit] >= 0).all(axis=0)
            if devices is not None:
                runnable &= devices
            remedy = "relax --pin or --forbid" if runnable.any() else "add a device that can"
            raise InputError(
                f"{members[unit][0]!r}: no device of {problem.cluster.name!r} may run all of it for this target, which "
                f"cannot split it; {remedy}"
            )
        return units

    def coarse(self, problem: Problem) -> Problem:
        """Returns `problem` with each unit as a group: same ops, same numbers, fewer placements."""
        graph = replace(problem.graph, groups=self.index.copy())
        return replace(problem, graph=graph, allowed=problem.allowed & self.allowed[self.index])


def grouped_ops(problem: Problem) -> Iterator[list[int]]:
    """Yields the ops of each group, groups in the order of their first ops."""
    ops: dict[int, list[int]] = defaultdict(list)
    for op in np.flatnonzero(problem.graph.groups >= 0).tolist():
        ops[int(problem.graph.groups[op])].append(op)
    yield from ops.values()


def find(parent: list[int], number: int) -> int:
    """Returns the root of `number` in a forest of joined numbers."""
    while parent[number] != number:
        parent[number] = parent[parent[number]]
        number = parent[number]
    return number


def join(parent: list[int], first: int, second: int) -> None:
    """Gives two numbers one root, the lower of theirs."""
    first, second = find(parent, first), find(parent, second)
    parent[max(first, second)] = min(first, second)


@dataclass(frozen=True)
class ExportTarget:
    """A tool and the functions that write its files. `read_units` returns the units that the tool places, with
    InputError for a graph that it cannot run. `write` returns the content of a file from the devices [U] of units.
    `offload`, of targets that can keep weights on a CPU, finds devices for units that do not fit, and the step as the
    tool runs it. `with_room` adds memory that the tool holds beside the graph, and `arrange` changes devices [U] into
    those that suit the tool best."""

    name: str
    level: str  # kind of its units: `module level`
    file_name: str  # by default, beside the plan
    read_units: Callable[[Problem], ExportUnits]
    write: Callable[[Problem, ExportUnits, I64], str]
    offload: Callable[[Problem, ExportUnits, I64], tuple[I64, Simulation] | None] | None = None
    options: tuple[str, ...] = ()  # as written on a command line
    with_room: Callable[[Problem], Problem] = lambda problem: problem
    arrange: Callable[[Problem, ExportUnits, I64], I64] | None = None
    notes: Callable[[Problem, ExportUnits, I64], list[str]] = lambda *_: []  # sentences on what is assumed
    reserve: float = 0.0  # share of each device's memory that the tool leaves free, unless it is told otherwise
    layers: Callable[[ExportUnits], Sequence[int]] = lambda _: ()  # units that any device may have more or fewer of
    takes_replicas: bool = False  # of batches in flight: a server each
    takes_shards: bool = False  # ops that are cut over the cards of a group
    with_shares: Callable[[tuple[int, ...]], "ExportTarget"] | None = None  # of the cards of a group, unequal ones
    with_experts: Callable[[Shards], "ExportTarget"] | None = None  # whole on each card of a group
    with_model: Callable[[ModelSource], "ExportTarget"] | None = None  # with options of its sizes

    def within_share(self, problem: Problem) -> Problem:
        """Returns `problem` with the memory that the tool takes of each device by default."""
        limits = [int((1 - self.reserve) * device.memory_bytes) for device in problem.cluster.devices]
        return replace(problem, memory_limit_bytes=np.minimum(problem.memory_limit_bytes, limits))


def stage_starts(devices: I64) -> list[int]:
    """Returns the first unit of each stage, from the devices [U] of a chain."""
    return [0, *(np.flatnonzero(np.diff(devices)) + 1).tolist()]


def stage_members(units: ExportUnits, devices: I64) -> list[list[str]]:
    """Returns the members of the units of each stage, from the devices [U] of a chain."""
    ends = pairwise([*stage_starts(devices), units.num_units])
    return [list(chain.from_iterable(units.members[start:end])) for start, end in ends]


def is_cpu(problem: Problem) -> Bool:
    """[D] Returns which devices are CPUs."""
    return np.array([device.is_cpu for device in problem.cluster.devices])


def gpu_numbers(problem: Problem) -> list[int]:
    """[D] Returns the number of each GPU, counted in the cluster's order; -1 for a CPU."""
    cpus = is_cpu(problem)
    numbers: list[int] = np.where(cpus, -1, np.cumsum(~cpus) - 1).tolist()
    return numbers


def cards_of(problem: Problem) -> list[list[tuple[str, int]]]:
    """[D] Returns (host, number there) of each device's GPUs, in the cluster's order; [] for a CPU. The cards of groups
    are numbered by the ends of their names, if all have one: cards in no group are left out."""
    names = [
        [] if is_host else list(device.group or (device.name,))
        for device, is_host in zip(problem.cluster.devices, is_cpu(problem).tolist(), strict=True)
    ]
    ends = {name: re.search(r"\d+$", name) for own in names for name in own}
    is_named, count, cards = len(ends) > len(list(filter(None, names))) and all(ends.values()), Counter[str](), []
    for own in names:
        cards.append(list[tuple[str, int]]())
        for name in own:
            host, end = host_of(name), ends[name]
            cards[-1].append((host, int(end[0]) if is_named and end is not None else count[host]))
            count[host] += 1
    return cards


def check_one_host(problem: Problem, target: str) -> None:
    """Raises InputError if there are GPUs of several hosts, for a tool that is one process."""
    hosts = dict.fromkeys(host for cards in cards_of(problem) for host, _ in cards)
    if len(hosts) > 1:
        raise InputError(f"{target}: runs on one host, and {problem.cluster.name!r} has {len(hosts)}; place on one")


def visible_cards(problem: Problem, devices: Sequence[int]) -> str:
    """Returns the value of CUDA_VISIBLE_DEVICES for these devices in order."""
    cards = cards_of(problem)
    return visible_numbers(problem, [number for device in devices for _, number in cards[device]])


def visible_numbers(problem: Problem, numbers: Sequence[int]) -> str:
    """Returns the value of CUDA_VISIBLE_DEVICES for cards of a host; those of `local` count the cards visible here."""
    environment = {VISIBLE: ",".join(map(str, numbers))}
    is_local = problem.cluster.name.partition(":")[0] == "local"
    return among_visible(environment)[VISIBLE] if is_local else environment[VISIBLE]


def gpus(problem: Problem, target: str) -> Bool:
    """[D] Returns which devices are GPUs, since no other can be a rank; InputError if there are none."""
    is_gpu = ~is_cpu(problem)
    if not is_gpu.any():
        raise InputError(f"{target}: a rank is a GPU, and {problem.cluster.name!r} has none; add one")
    return np.asarray(is_gpu)


def write_ranks(problem: Problem, devices: I64, command: str, variable: str, target: str) -> str:
    """Writes the command as a comment, the `NAME=value` of a layout, and the GPUs in the order of pipeline ranks; those
    of several hosts as comments. InputError where the ranks of a host are no neighbours."""
    cards, ranks = cards_of(problem), devices[stage_starts(devices)].tolist()
    runs = [
        (host, list(own)) for host, own in groupby(ranks, lambda device: cards[device][0][0] if cards[device] else "")
    ]
    if len({host for host, _ in runs}) < len(runs):
        raise InputError(
            f"{target}: numbers ranks host by host, and the plan has stages in turns on hosts; place on one"
        )
    visible = [f"export CUDA_VISIBLE_DEVICES={visible_cards(problem, own)}" for _, own in runs]
    if len(runs) > 1:
        visible = [f"# on {host}: {line}" for (host, _), line in zip(runs, visible, strict=True)]
    return "\n".join((f"# {command}", variable, *visible, ""))
