"""Plans: answers, and how they were found; `gdp-plan` files (docs/machine-model.md, 3 and 6). N ops, D devices."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gdp import files, notebook
from gdp.arrays import I64, unique
from gdp.cluster import Cluster
from gdp.cluster.groups import members_of
from gdp.costs.ranges import StepRange, range_of
from gdp.errors import InputError, prefixed, suggest
from gdp.graph import Graph, GraphSource
from gdp.graph.layers import enclosing
from gdp.graph.microbatches import microbatch_of
from gdp.models.shards import WHOLE, Shards
from gdp.simulator.mfu import mfu_of

if TYPE_CHECKING:
    from gdp.simulator.problem import Problem

FORMAT, VERSION = "gdp-plan", 2
_MOST_SUGGESTED = 20_000  # names that are searched for similar ones


@dataclass(frozen=True, slots=True)
class Baseline:
    """The result of another placer on the same problem."""

    status: str  # "ok", "infeasible" (does not fit), "failed" (found no placement) or "skipped" (no time for it)
    step_time_ns: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class NoisyTimes:
    """Step times of the plan replayed under perturbed op times."""

    noise: float  # relative standard deviation of an op's time
    mean_ns: int
    p95_ns: int  # 95 % of the steps take at most this
    num_draws: int


@dataclass(frozen=True, eq=False)
class Search:
    """The course of the search for a plan; not part of a `gdp-plan` file."""

    seconds: float
    simulations: int
    baselines: Mapping[str, Baseline]
    busy_fraction: npt.NDArray[np.float64]  # [D] share of the step in which the device computes
    missing_bytes: I64  # [D] by how much the peak passes the memory limit: all 0 when the plan is feasible
    interrupted: bool = False
    under_noise: NoisyTimes | None = None
    order: str = "b-level"  # that ops were started in, one of `gdp.simulator.orders`


@dataclass(frozen=True, slots=True)
class Asked:
    """The question that a plan answers, as it was typed."""

    model: str = ""  # MODEL; "": not known
    options: Mapping[str, Any] = field(default_factory=dict)  # by their names with _ for -, where they were given
    cluster: str = ""  # DEVICES; "": not known
    directory: str = ""  # where relative paths in them begin

    @classmethod
    def of(cls, problem: "Problem", placer: str, seed: int) -> "Asked":
        """Returns the question of a call in Python, as far as it is known: names of the graph and of the devices."""
        options = {"placer": placer, "seed": seed} | microbatching_of(problem.graph)
        return cls(problem.graph.name, options, problem.cluster.name, os.getcwd())


def microbatching_of(graph: Graph) -> dict[str, Any]:
    """Returns the option `microbatches` that `graph` was made with; {} for one micro-batch."""
    count = int(microbatch_of(graph).max(initial=0)) + 1
    return {} if count == 1 else {"microbatches": count}


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement and the order of ops on each device, with the figures that a replay gives; a `gdp-plan` file.

    `search` says how it was found and `problem` what was asked when it comes from `gdp.place`; both are None when it
    was read from a file. `asked` says what graph and devices can be read from again."""

    graph: str  # fingerprint
    cluster: str  # fingerprint
    devices: tuple[str, ...]
    placement: I64  # [N] device of each op
    order: tuple[I64, ...]  # [D] the ops of each device in the order of their starts
    step_time_ns: int
    peak_memory_bytes: I64  # [D]
    lower_bound_ns: int
    placer: str
    seed: int
    gdp_version: str
    search: Search | None = None
    problem: "Problem | None" = None
    layout: Mapping[str, Any] | None = None  # how the step is cut (`gdp.parallel.Step.document`); None: it is not
    asked: Asked | None = None  # None: known from `problem` alone
    path: Path | None = None  # of the file that it was read from

    @property
    def question(self) -> Asked:
        """The question that the plan answers, as far as it is known."""
        if self.asked is not None:
            return self.asked
        return Asked() if self.problem is None else Asked.of(self.problem, self.placer, self.seed)

    @property
    def step_range(self) -> StepRange | None:
        """The range that 80 % of measured steps of this kind are in: `plan.step_range.of(plan.step_time_ns)`.

        None where the problem is not known, or devices tell nothing of their kernels."""
        return None if self.problem is None else range_of(self.problem.graph, self.problem.cluster, self.placement)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the share of the devices' arithmetic rate that the FLOPs of the model take.

        None without FLOPs, and where the problem is not known."""
        found = None if self.problem is None else mfu_of(self.problem, self.placement, self.step_time_ns)
        return found and found[0]

    def __repr__(self) -> str:
        """Returns `Plan(13.203 ms on 2 of 3 devices by auto, at most 3.2% above the lower bound)`."""
        time, used = notebook.milliseconds(self.step_time_ns), len(unique(self.placement))
        where = f"{used} of {notebook.count(len(self.devices), 'device')} by {self.placer}"
        if self.status == "ok":
            return f"Plan({time} on {where}, {self._distance})"
        return f"Plan(infeasible: {self._lacking}; {time} if it fitted, on {where})"

    @property
    def _distance(self) -> str:
        if not self.lower_bound_ns and self.step_time_ns:
            return "at an unknown distance from the optimum (lower bound 0)"
        return f"at most {self.gap:.1%} above the lower bound"

    @property
    def _lacking(self) -> str:
        assert self.search is not None
        missing = zip(self.devices, self.search.missing_bytes.tolist(), strict=True)
        return ", ".join(f"{name} lacks {notebook.size(size)}" for name, size in missing if size)

    def device_of(self, name: str, graph: "GraphSource | None" = None) -> str:
        """Returns the name of the device of the op `name`, or of all ops in the module `name` and the modules below it.

        `graph` is needed for a plan from a file. Raises InputError for an unknown name, and for a module whose ops are
        on several devices, with the number on each; `devices_of` returns these numbers."""
        counts = self.devices_of(name, graph)
        if len(counts) > 1:
            parts = ", ".join(f"{notebook.count(number, 'op')} on {device}" for device, number in counts.items())
            raise InputError(f"module {name!r} is split: {parts}; ask for its submodules or ops, or use devices_of")
        return next(iter(counts))

    def devices_of(self, name: str, graph: "GraphSource | None" = None) -> dict[str, int]:
        """Returns the number of ops on each device in use, the most first, of the op or the module `name`."""
        known = self._graph(graph)
        number = known.op_numbers.get(name)
        if number is not None:
            return {self.devices[self.placement[number]]: 1}
        inside = [module == name or module.startswith(f"{name}.") for module in known.modules]
        if not name or not any(inside):
            modules = {path for module in set(known.modules) for path in enclosing(module)}
            raise InputError(
                f"graph {known.name!r} has neither an op nor a module {name!r}; "
                f"{suggest(name, [*sorted(modules), *known.op_names][:_MOST_SUGGESTED], most=8)}"
            )
        counts = np.bincount(self.placement[inside], minlength=len(self.devices))
        used = sorted(np.flatnonzero(counts).tolist(), key=lambda device: -counts[device])
        return {self.devices[device]: int(counts[device]) for device in used}

    def _graph(self, graph: "GraphSource | None") -> Graph:
        if graph is None and self.problem is None:
            raise InputError("a plan from a file does not have its graph; give it as graph=gdp.load(MODEL)")
        known = self.problem.graph if graph is None and self.problem is not None else Graph.of(graph)  # type: ignore[arg-type]
        if self.graph != known.fingerprint:
            raise InputError(_other_graph(self, known))
        return known

    @property
    def status(self) -> str:
        """ "ok", or "infeasible" when the best placement found does not fit in memory."""
        return "infeasible" if self.search is not None and self.search.missing_bytes.any() else "ok"

    @property
    def gap(self) -> float:
        """The largest possible distance to the optimum: 0.1 = at most 10 % above; infinite if the bound is 0."""
        if self.step_time_ns == self.lower_bound_ns:
            return 0.0
        return self.step_time_ns / self.lower_bound_ns - 1.0 if self.lower_bound_ns else float("inf")

    def _repr_html_(self) -> str:
        """The summary that Jupyter shows."""
        bound = f"{self._distance}, {notebook.milliseconds(self.lower_bound_ns)}"
        counts = np.bincount(self.placement, minlength=len(self.devices))
        busy = [] if self.search is None else self.search.busy_fraction.tolist()
        rows = [
            [name, f"{counts[device]:,}", f"{self.peak_memory_bytes[device] / 2**30:.3f} GiB"]
            + ([f"{busy[device]:.1%}"] if busy else [])
            for device, name in enumerate(self.devices)
        ]
        others = {} if self.search is None else self.search.baselines
        times = {name: other.step_time_ns for name, other in others.items() if other.status == "ok"}
        note = ", ".join(f"{name} {notebook.milliseconds(time_ns)}" for name, time_ns in times.items())
        fits = "" if self.status == "ok" else f"Infeasible: {self._lacking}. "
        title = f"{fits}Step time {notebook.milliseconds(self.step_time_ns)} by {self.placer}, {bound}"
        headings = ["device", "ops", "peak memory"] + (["busy"] if busy else [])
        return notebook.table(title, headings, rows, f"Other placers: {note}." if note else "")

    def to_dataframe(self, graph: "GraphSource | None" = None) -> Any:
        """Returns a pandas DataFrame with a row for each op: what it is, its device and its place in the order there.

        Needs pandas, and for a plan from a file its `graph`. InputError without."""
        try:
            import pandas
        except ImportError:
            raise InputError("to_dataframe needs pandas; install it with `pip install pandas`") from None
        known, position = self._graph(graph), np.zeros(len(self.placement), np.int64)
        for ops in self.order:
            position[ops] = np.arange(len(ops))
        columns = {
            "op": known.op_names,
            "kind": known.kinds,
            "module": known.modules,
            "phase": known.phases,
            "microbatch": known.microbatches,
            "replica": known.replicas,
            "device": np.array(self.devices)[self.placement],
            "position": position,
        }
        return pandas.DataFrame(columns)

    def to_document(self) -> dict[str, Any]:
        """The `gdp-plan` document."""
        values = {name: getattr(self, name) for name in _PLAN_FIELDS if name not in ("format", "version", "layout")}
        lists = {name: values[name].tolist() for name in ("placement", "peak_memory_bytes")}
        lists |= {"devices": list(self.devices), "order": [ops.tolist() for ops in self.order]}
        document = {"format": FORMAT, "version": VERSION} | values | lists | {"asked": asdict(self.question)}
        return document if self.layout is None else document | {"layout": dict(self.layout)}

    def save(self, path: str | Path) -> None:
        """Write a `gdp-plan` file, atomically; gzip if `path` ends in `.gz`."""
        files.write_json(path, self.to_document())

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a `gdp-plan` file. InputError names the file, the place and the remedy."""
        document = files.read_json(path)
        with prefixed(path):
            return replace(cls.from_document(document), path=Path(path))

    @classmethod
    def from_document(cls, document: object) -> "Plan":
        """The plan of a `gdp-plan` document; strict."""
        if isinstance(document, dict) and (document.get("format"), document.get("version")) == (FORMAT, 1):
            raise InputError(
                "is a plan of version 1, which does not say what was asked and has other fingerprints; place it anew"
            )
        content = files.require_header(document, FORMAT, VERSION)
        files.require_keys(content, "plan", _PLAN_FIELDS, set(_PLAN_FIELDS) - {"layout"})
        num_ops, num_devices = len(content["placement"]), len(content["devices"])
        for op, device in enumerate(content["placement"]):
            if not 0 <= device < num_devices:
                raise InputError(f"placement: op {op} is on device {device}; devices are 0 to {num_devices - 1}")
        for name in ("order", "peak_memory_bytes"):
            if len(content[name]) != num_devices:
                raise InputError(f"{name} has {len(content[name])} entries; one per device, {num_devices}, is expected")
        seen = [False] * num_ops
        for device, ops in enumerate(content["order"]):
            for op in ops:
                if not 0 <= op < num_ops:
                    raise InputError(f"order of device {device}: {op} is no op; ops are 0 to {num_ops - 1}")
                if content["placement"][op] != device:
                    raise InputError(
                        f"order of device {device}: op {op} is placed on device {content['placement'][op]}"
                    )
                if seen[op]:
                    raise InputError(f"order of device {device}: op {op} is listed twice; list it once")
                seen[op] = True
        if not all(seen):
            raise InputError(f"order: op {seen.index(False)} is missing; list every op once")
        values = {name: value for name, value in content.items() if name not in ("format", "version")}
        values |= {name: np.array(content[name], np.int64) for name in ("placement", "peak_memory_bytes")}
        values["devices"], values["asked"] = tuple(content["devices"]), Asked(**content["asked"])
        values["order"] = tuple(np.array(ops, np.int64) for ops in content["order"])
        return cls(**values)

    @property
    def shards(self) -> Shards:
        """The degrees by which ops are cut over the groups that the plan's devices are."""
        return WHOLE if self.layout is None else Shards.of_document(self.layout)

    @property
    def num_ranks(self) -> int:
        """The number of cards that each device of the plan stands for."""
        return self.shards.num_ranks

    @property
    def cards(self) -> tuple[str, ...]:
        """The cards of all devices, each with as many as there are ranks."""
        return tuple(card for name in self.devices for card in members_of(name, self.num_ranks))

    def check_runnable(self, verb: str) -> None:
        """Raises InputError, with the remedy, for a plan on groups of cards: its ops are cut."""
        if self.num_ranks > 1:
            raise InputError(
                f"the plan is of the local program of {self.num_ranks} ranks, which is not {verb} in this version; "
                "leave tensor out of --parallel (--parallel none places ops alone)"
            )

    def check_belongs(self, graph: Graph, cluster: Cluster) -> None:
        """InputError unless this is a plan of `graph` on `cluster`."""
        if self.graph != graph.fingerprint:
            raise InputError(_other_graph(self, graph))
        if self.cluster != cluster.fingerprint:
            raise InputError(
                f"the plan is for cluster {self.cluster[:12]}, not for {cluster.name!r} ({cluster.fingerprint[:12]}); "
                "place for this cluster anew"
            )


def _other_graph(plan: Plan, graph: Graph) -> str:
    num_ops = len(plan.placement)
    differs = "as many ops, with other costs, names or edges"
    if graph.num_ops != num_ops:
        differs = f"{graph.num_ops:,} ops, and the plan places {num_ops:,}"
    return (
        f"the plan is of graph {plan.graph[:12]}, not of {graph.name!r} ({graph.fingerprint[:12]}): it has {differs}; "
        "place this graph anew, or give the options that it was placed with, such as --microbatches"
    )


def _is_names(value: object) -> bool:
    """a list of strings"""
    return type(value) is list and all(type(item) is str for item in value)


def _is_orders(value: object) -> bool:
    """a list of lists of integers"""
    return type(value) is list and all(files.is_number_list(item) for item in value)


def _is_sizes(value: object) -> bool:
    """a list of integers from 0 to 2^63 - 1"""
    return type(value) is list and all(files.is_size(item) for item in value)


def _is_asked(value: object) -> bool:
    """an object with model, options, cluster and directory"""
    texts = ("model", "cluster", "directory")
    return (
        type(value) is dict
        and value.keys() == {"options", *texts}
        and type(value["options"]) is dict
        and all(type(value[name]) is str for name in texts)
    )


def _is_layout(value: object) -> bool:
    """an object, as --parallel writes it"""
    lists = ("places", "ring", "hosts")
    return type(value) is dict and all(value.get(key) is None or files.is_number_list(value[key]) for key in lists)


_PLAN_FIELDS = {
    "format": files.is_string,
    "version": files.is_size,
    "graph": files.is_string,
    "cluster": files.is_string,
    "devices": _is_names,
    "placement": _is_sizes,
    "order": _is_orders,
    "step_time_ns": files.is_size,
    "peak_memory_bytes": _is_sizes,
    "lower_bound_ns": files.is_size,
    "placer": files.is_string,
    "seed": files.is_size,
    "gdp_version": files.is_string,
    "layout": _is_layout,
    "asked": _is_asked,
}
