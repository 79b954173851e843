"""Tasks of drawn architectures: each graph has a cluster of its own, and some steps are in a drawn layout."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.architectures.graph_set import StoredGraph
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.parallel.layout import BLOCKS, NONE, Layout
from gdp.parallel.step import Step
from gdp.policy.training.tasks import TaskConfig, Tasks, TrainingTask, scale_batch

_OWN = 2  # spawn key: tasks of graphs as they are, are drawn apart


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnLayouts:
    """Layouts of steps to train on; untuned."""

    share: float = 0.3  # of tasks whose step is cut into replicas and micro-batches
    most_ops: int = 8000  # of these steps, about
    microbatches: tuple[int, ...] = (1, 2, 3, 4, 8)
    uneven_share: float = 0.3  # of layouts with several replicas: the first ones have a micro-batch more
    zero: tuple[int, ...] = (0, 0, 1, 2, 3)
    recomputed_share: float = 0.25

    def draw(self, rng: np.random.Generator, num_devices: int, max_parts: int) -> Layout:
        """Draws a layout of at most `max_parts` copies of a model, and of at most a replica for each device."""
        data = int(rng.integers(1, min(num_devices, max(max_parts, 1)) + 1))
        most = max(max_parts // data, 1)
        each = int(rng.choice([count for count in self.microbatches if count <= most]))
        counts = [each] * data
        if data > 1 and each < most and rng.random() < self.uneven_share:
            first = int(rng.integers(1, data))
            counts[:first] = [each + 1] * first
        zero = int(rng.choice(self.zero)) if data > 1 else 0
        recompute = BLOCKS if rng.random() < self.recomputed_share else NONE
        return Layout(tuple(counts), zero if len(set(counts)) == 1 else min(zero, 2), recompute)


class DrawnTasks(Tasks):
    """Tasks of stored graphs."""

    def __init__(
        self, graphs: Sequence[StoredGraph], config: TaskConfig, seed: int, layouts: DrawnLayouts | None = None
    ) -> None:
        self.graphs, self.layouts = tuple(graphs), layouts or DrawnLayouts()
        self.sources, self.config, self.seed = (), config, seed
        self.num_sources = len(self.graphs)
        self._recent: OrderedDict[int, TrainingTask] = OrderedDict()

    def to_document(self) -> dict[str, Any]:
        """See `Tasks.to_document`."""
        sources = [graph.fingerprint for graph in self.graphs]
        return {**super().to_document(), "layouts": asdict(self.layouts), "sources": sources}

    def inputs(self) -> dict[str, Any]:
        """See `Tasks.inputs`."""
        names = ("name", "num_ops", "fingerprint")
        return {"graphs": [{name: getattr(graph, name) for name in names} for graph in self.graphs], "clusters": []}

    def graph(self, number: int) -> Graph:
        """See `Tasks.graph`."""
        return self.graphs[number].load()

    def own(self, number: int) -> TrainingTask:
        """Draws the task of a graph by the seed and its number alone."""
        return self.vary(number, np.random.default_rng(np.random.SeedSequence([self.seed, number], spawn_key=(_OWN,))))

    def step(self, graph: Graph, factor: float, cluster: Cluster, rng: np.random.Generator) -> Graph:
        """Returns the step of a batch `factor` times as large, in a drawn layout or whole."""
        if rng.random() >= self.layouts.share:
            return scale_batch(graph, factor)
        layout = self.layouts.draw(rng, cluster.num_devices, self.layouts.most_ops // graph.num_ops)
        part = scale_batch(graph, factor / layout.num_parts)
        try:
            return Step.of(part, layout).graph
        except InputError:  # it has no blocks
            return part
