"""START HERE: `cut_step` turns a plan of a layout into a step that tools can run, and simulates it. A `LayoutTarget` is
a tool that trains in layouts, with its file and what is lost in it, and the ranks of torchrun.

Tools put a replica on one device, or cut its layers into stages of one device each. A plan may have single ops
elsewhere; these go where the others of their replica and stage are. N ops, D devices, R replicas, P stages."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.export import megatron
from gdp.export.adapt import adapt_within, simulated
from gdp.export.export_target import ExportUnits, cards_of, is_cpu, stage_members, stage_starts, visible_numbers
from gdp.export.layouts.precision import Held, precision_of
from gdp.export.module_chains import find_layers
from gdp.graph import Graph
from gdp.graph.builder import GraphBuilder
from gdp.graph.copies import HOST_COPY
from gdp.graph.parameter_bytes import ParameterBytes
from gdp.models.model import PURE_BF16
from gdp.models.shards import WHOLE
from gdp.models.source import ModelSource
from gdp.parallel.layout import BLOCKS, NONE, SELECTIVE, Layout
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation


@dataclass(frozen=True, eq=False)
class CutStep:
    """A step in replicas of one device each, or of several in stages of layers."""

    problem: Problem
    layout: Layout
    devices: I64  # [R, P] replicas in the order of ranks
    microbatches: tuple[int, ...]  # [R]
    stages: tuple[tuple[str, ...], ...]  # [P] paths of layers, E before them, L behind; empty without `has_stages`
    batch_size: int | None  # samples of all replicas; None if the plan does not have it
    simulation: Simulation  # with what the tool holds
    plan_step_time_ns: int
    num_moved: int  # ops that the plan has on another device
    held: Held = field(default_factory=Held)
    refused: tuple[tuple[Held, Simulation], ...] = ()  # what the tool would rather hold, and that does not fit
    source: ModelSource | None = None  # MODEL, where it is known

    @property
    def num_stages(self) -> int:
        return int(self.devices.shape[1])

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the layers of all stages."""
        return tuple(name for names in self.stages for name in names if name not in ("E", "L"))

    @property
    def samples(self) -> int:
        """The samples of a micro-batch on a rank. InputError for a plan that does not say how many its batch has."""
        if self.batch_size is None:
            raise InputError("the plan does not say how many samples its batch has; place the model anew")
        return self.batch_size // (self.layout.num_parts * self.layout.shards.samples)


def cut_step(
    problem: Problem,
    plan: Plan,
    target: str,
    *,
    has_stages: bool,
    held_by: Callable[[Graph, Layout], Sequence[Held]] = lambda graph, layout: (Held(),),
    source: ModelSource | None = None,
) -> CutStep:
    """Returns the step of a plan with a layout, as a tool runs it with (`has_stages`) or without pipelines. It holds
    the first of `held_by` with which it fits, or the last. InputError for what the `target` cannot run."""
    assert plan.layout is not None, "the caller looks for one"
    layout = Layout.of_document(plan.layout)
    is_group = layout.shards != WHOLE and "batch" not in plan.layout  # it alone, which has the batch of MODEL
    places = plan.layout.get("places")
    num_places = layout.stages or (1 if places is None else len(set(places)))
    if num_places > 1 and not has_stages:
        alone = replace(layout, stages=1)
        raise InputError(
            f"{target}: a replica of the plan is on {num_places} devices, and {target} has one device for each; "
            f"place with --parallel {alone}, or export to torchtitan or megatron"
        )
    if problem.graph.is_in_role(HOST_COPY).any():
        raise InputError(f"{target}: the plan keeps activations on the host, which {target} does not; place without")
    stage_of = np.zeros(problem.num_ops, np.int64)
    stages: tuple[tuple[str, ...], ...] = ()
    if has_stages:
        stage_of, stages = _stages(problem, plan, num_places)
    replica = problem.graph.replicas
    devices = _assigned(problem, plan.placement, replica, stage_of)
    _check_cards(problem, devices, target)
    placement = devices[replica, stage_of]
    order = _order(problem, devices, plan.layout.get("ring"))
    tried: list[tuple[Held, Simulation]] = []
    for held in held_by(problem.graph, layout):
        graph = held.step(problem.graph)
        own = problem if graph is problem.graph else Problem.build(graph, problem.cluster, max_memory=_limits(problem))
        tried.append((held, simulated(own, placement, plan)))
        if not tried[-1][1].missing_bytes.any():
            break
    *refused, (held, simulation) = tried
    return CutStep(
        problem,
        layout,
        devices[order],
        tuple(np.array(layout.microbatches)[order].tolist()),
        stages,
        source.batch_size if is_group and source is not None else plan.layout.get("batch"),
        simulation,
        plan.step_time_ns,
        int((placement != plan.placement).sum()),
        held,
        tuple(refused),
        source,
    )


def _assigned(problem: Problem, placement: I64, replica: I64, stage_of: I64) -> I64:
    """[R, P] Returns a device of its own for each stage of each replica, with as much of its time there as can be."""
    num_stages = int(stage_of.max()) + 1
    rows = replica * num_stages + stage_of
    time_ns = np.zeros((int(rows.max()) + 1, problem.num_devices))
    np.add.at(time_ns, (rows, placement), problem.mean_op_time_ns + 1e-6)
    found, device = linear_sum_assignment(time_ns, maximize=True)
    assert np.array_equal(found, np.arange(len(time_ns))), "replicas have devices of their own"
    return np.asarray(device.reshape(-1, num_stages), np.int64)


def _order(problem: Problem, devices: I64, ring: Sequence[int] | None) -> I64:
    """[R] Returns the replicas in the order of the ring, those of a host together."""
    order = np.arange(len(devices)) if ring is None else np.array(ring, np.int64)
    if sorted(order.tolist()) != list(range(len(devices))):
        raise InputError("layout: ring is no order of the replicas; the plan is of another model, place it anew")
    cards = cards_of(problem)
    hosts = np.array([cards[device][0][0] for device in devices[order, 0].tolist()])
    first = {host: place for place, host in reversed(list(enumerate(hosts.tolist())))}
    return np.asarray(order[np.argsort([first[host] for host in hosts.tolist()], kind="stable")], np.int64)


def _check_cards(problem: Problem, devices: I64, target: str) -> None:
    """Raises InputError if a replica is on a CPU, which is no rank."""
    used = devices[is_cpu(problem)[devices]]
    if len(used):
        name = problem.cluster.devices[int(used[0])].name
        raise InputError(f"{target}: a rank is a GPU, and the plan has a replica on {name}; place without that device")


def _stages(problem: Problem, plan: Plan, num_places: int) -> tuple[I64, tuple[tuple[str, ...], ...]]:
    """Returns (stage [N] of each op, names [P][] in each stage), from the plan of the first replica. Its layers are cut
    where the plan has most of its time, as for pipelines without replicas."""
    graph, replica = problem.graph, problem.graph.replicas
    is_collective = graph.is_collective
    ops = np.flatnonzero((replica == 0) & ~is_collective)
    part = _part(problem, ops)
    layers = find_layers(part)
    names = ["E", *layers.names, "L"]
    if num_places == 1:
        return np.zeros(graph.num_ops, np.int64), (tuple(names),)
    time_ns = np.bincount(plan.placement[ops], problem.mean_op_time_ns[ops] + 1.0, problem.num_devices)
    is_own = np.zeros(problem.num_devices, np.bool_)
    is_own[np.argsort(-time_ns, kind="stable")[:num_places]] = True
    part = part.with_allowed(problem.allowed[ops] & is_own)
    units = ExportUnits.chain(part, layers.positions, names)
    number = np.full(graph.num_ops, -1)
    number[ops] = np.arange(len(ops))
    order = tuple(number[own][number[own] >= 0] for own in plan.order)
    own_plan = replace(plan, placement=plan.placement[ops], order=order, search=None, problem=None)
    adapted = adapt_within(part, own_plan, megatron.TARGET, units, graph=part.graph, may_offload=False)
    ends = [*stage_starts(adapted.devices), units.num_units]
    stages = tuple(map(tuple, stage_members(units, adapted.devices)))
    stage_of_unit = np.searchsorted(ends, np.arange(units.num_units), side="right") - 1
    return _of_all(graph, ops, stage_of_unit[units.index]), stages


def _of_all(graph: Graph, ops: I64, stage_of: I64) -> I64:
    """[N] Extends the stages of the first replica's `ops` to copies of these, and to what is made for them."""
    of_op = np.full(graph.num_ops, -1)
    of_op[ops] = stage_of
    found = np.where(of_op[graph.first_copy] >= 0, of_op[graph.first_copy], of_op[graph.root])
    assert (found >= 0).all(), "sums and exchanges are made for updates"
    return found


def _part(problem: Problem, ops: I64) -> Problem:
    """Returns the problem of placing `ops` alone; what other ops make is there from the start."""
    graph, builder = problem.graph, GraphBuilder()
    number = np.full(graph.num_ops, -1)
    number[ops] = builder.copy_ops(graph, ops)
    builder.copy_origins(graph, number)
    builder.copy_tensors(graph, number)
    part = builder.build(graph.name)
    return Problem.build(part, problem.cluster, max_memory_bytes=_limits(problem))


def _limits(problem: Problem) -> dict[str, int]:
    names = [device.name for device in problem.cluster.devices]
    return dict(zip(names, problem.memory_limit_bytes.tolist(), strict=True))


@dataclass(frozen=True)
class LayoutTarget:
    """A tool and the functions that write its file."""

    name: str
    level: str  # what it places: `a device a replica`
    file_name: str  # by default, beside the plan
    has_stages: bool
    write: Callable[[CutStep], str]  # InputError for what the tool has no words for
    notes: Callable[[CutStep], list[str]]  # sentences on what the tool does otherwise
    held_by: Callable[[Graph, Layout], Sequence[Held]]  # what it holds in training, the first that fits
    degrees: tuple[str, ...] = ()  # of shards beside `tensor`


@dataclass(frozen=True)
class RankOrder:
    """The GPUs [H][] of each host, by their numbers there, in the order of ranks; H hosts."""

    gpus: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]  # [H] as the cluster calls them, in letters that end no comment
    visible: tuple[str, ...]  # [H] the values of CUDA_VISIBLE_DEVICES

    @classmethod
    def of(cls, problem: Problem, devices: Sequence[int]) -> "RankOrder | None":
        """Returns the ranks on `devices`, those of a group one behind the other. None if the ranks of a host are not
        neighbours, or hosts have unlike numbers."""
        cards, runs, last = cards_of(problem), dict[str, list[int]](), None
        for host, number in (card for device in devices for card in cards[device]):
            if host != last and host in runs:
                return None
            runs.setdefault(host, []).append(number)
            last = host
        if len({len(run) for run in runs.values()}) > 1:
            return None
        visible = (visible_numbers(problem, run) for run in runs.values())
        return cls(tuple(map(tuple, runs.values())), tuple(map(_plain, runs)), tuple(visible))

    def torchrun(self, host: str = '"$NODE_RANK"', first: str = '"$MASTER_ADDR"') -> str:
        """Returns the command without a script; `host` is the number of the one it runs on, `first` host 0."""
        each = f"--nproc-per-node {len(self.gpus[0])}"
        if len(self.gpus) == 1:
            return f"torchrun --standalone {each}"
        return f"torchrun --nnodes {len(self.gpus)} --node-rank {host} --master-addr {first} {each}"

    def commands(self, program: str) -> list[str]:
        """[H] Returns the command that starts `program` on each host."""
        return [
            f"CUDA_VISIBLE_DEVICES={gpus} {self.torchrun(str(number), 'HOST0')} {program}{host and f'  # on {host}'}"
            for number, (gpus, host) in enumerate(zip(self.visible, self.hosts, strict=True))
        ]

    def script(
        self, titles: Sequence[str], options: Sequence[str], program: str = "", environment: Sequence[str] = ()
    ) -> str:
        """Returns a shell script that starts its arguments, with `options` behind them, on all ranks of a host;
        `environment` has lines such as `NAME=1`."""
        if len(self.gpus) == 1:
            visible = [f"export CUDA_VISIBLE_DEVICES={self.visible[0]}"]
        else:
            cases = [
                f"  {number}) export CUDA_VISIBLE_DEVICES={gpus} ;;  # {host}"
                for number, (gpus, host) in enumerate(zip(self.visible, self.hosts, strict=True))
            ]
            visible = [
                ': "${NODE_RANK:?is the number of this host}" "${MASTER_ADDR:?is the address of host 0}"',
                'case "$NODE_RANK" in',
                *cases,
                "esac",
            ]
        command = " ".join(["exec", self.torchrun(), *([program] if program else []), '"$@"'])
        visible += [f"export {variable}" for variable in environment]
        lines = [*(f"# {title}" for title in titles), *visible, " \\\n  ".join([command, *options])]
        return "\n".join(lines) + "\n"


def title_of(step: CutStep) -> str:
    """Returns `gpt2 in the layout data=4`."""
    return _plain(f"{step.problem.graph.name} in the layout {step.layout}")


def _plain(text: str) -> str:
    """Returns text of letters that end no comment: names of graphs and hosts are any text."""
    return re.sub(r"[^\w ?=&:./,@+-]", "_", text, flags=re.ASCII)


def ranks_of(step: CutStep, target: str, *, by_replica: bool = False) -> RankOrder:
    """Returns the ranks stage by stage, or replica by replica; InputError if torchrun cannot number them so."""
    devices = step.devices if by_replica else step.devices.T
    ranks = RankOrder.of(step.problem, devices.ravel().tolist())
    if ranks is None:
        raise InputError(
            f"{target}: numbers ranks host by host, and the plan has replicas or stages in turns on hosts; "
            "place with another number of stages, or on as many cards of each host"
        )
    return ranks


def check_even(step: CutStep, target: str) -> None:
    """Raises InputError for replicas with unequal micro-batches, and for adapters: these tools train all weights."""
    if any(name.endswith(".lora_A") for name in step.problem.graph.op_names):
        raise InputError(f"{target}: trains all weights, and the plan adapters (--lora); export to torch-fsdp")
    if not step.layout.is_even:
        counts = ":".join(map(str, step.microbatches))
        raise InputError(
            f"{target}: has as many micro-batches in each replica, and the plan has {counts}; "
            f"place with --parallel data={step.layout.data}, or export to torch-fsdp"
        )


def common_notes(step: CutStep) -> list[str]:
    """Returns sentences on what no tool does as the plan has it."""
    notes = [step.held.sentence] if step.held.sentence else []
    each, precision = ParameterBytes.of(step.problem.graph), precision_of(step.problem.graph)
    if each is not None and abs(each.optimizer_state - (4 if precision == PURE_BF16 else 8)) > 1:
        notes.append(
            f"The plan's optimizer has {each.optimizer_state:.3g} bytes of state a parameter, not those of Adam; give "
            "the tool the same optimizer."
        )
    if step.num_moved:
        notes.append(
            f"{step.num_moved:,} ops that the plan has on other devices are on those of their replica and stage."
        )
    if step.layout.data > 1:
        notes.append("NCCL chooses its own rings and buckets for sums over replicas.")
    if step.layout.recompute != NONE and any("batch_norm" in kind for kind in step.problem.graph.kinds):
        notes.append("Running statistics of batch normalisation in recomputed modules are updated twice.")
    if step.num_stages > 1:
        notes.append("The order of micro-batches is 1F1B.")
    return notes


def recomputed_layers(step: CutStep, target: str) -> set[str]:
    """Returns the paths of the layers that are recomputed. InputError for other modules."""
    modules = step.layout.recompute
    if isinstance(modules, str):
        return set(step.layers) if modules in (BLOCKS, SELECTIVE) else set()
    others = [path for path in modules if path not in step.layers]
    if others:
        raise InputError(f"{target}: recomputes whole layers, not {others[0]}; place with recompute=blocks")
    return set(modules)
