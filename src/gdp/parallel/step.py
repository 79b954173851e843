"""START HERE: from the graph of one micro-batch and a layout to the graph of the step.

one micro-batch --recompute--> --repeat (micro-batches)--> --copy, join by rings (replicas, ZeRO)--> step
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64
from gdp.graph import Graph
from gdp.graph.microbatches import accumulated, base_name, replica_of
from gdp.parallel.buckets import BUCKET_BYTES
from gdp.parallel.layout import Layout
from gdp.parallel.replicas import replicated


@dataclass(frozen=True, eq=False)
class Step:
    """The graph of a step that is cut as `layout` says, and where its ops come from.

    N ops of one micro-batch, M ops of the step, R replicas, P places of a replica.
    """

    graph: Graph
    layout: Layout
    origin: I64  # [M] the op of the micro-batch that each is a copy of, or is to share a device with
    replica: I64  # [M]

    @classmethod
    def of(
        cls,
        graph: Graph,
        layout: Layout,
        *,
        places: I64 | None = None,
        ring: Sequence[int] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> "Step":
        """Returns the step of `layout`, from the step `graph` of one micro-batch.

        `places` [N] are equal for ops of a replica that are sure to share a device, by default for all; `ring` [R] is
        the order of replicas in rings. InputError where the layout does not suit the graph.
        """
        steps = {count: accumulated(graph, count) for count in set(layout.microbatches)}
        replicas = [steps[count] for count in layout.microbatches]
        all_places = None if places is None else [places[_origins(graph, replica)] for replica in replicas]
        whole = replicated(replicas, places=all_places, ring=ring, bucket_bytes=bucket_bytes)
        return cls(whole, layout, _origins(graph, whole), replica_of(whole))

    def placement(self, places: npt.ArrayLike, devices: npt.ArrayLike) -> I64:
        """Returns the placement [M] of replicas that are placed alike.

        `places` [N] is the place of each op of a micro-batch, 0 to P - 1, and `devices` [R, P] the device that is each
        place of each replica.
        """
        return np.asarray(np.asarray(devices)[self.replica, np.asarray(places)[self.origin]], np.int64)


def _origins(graph: Graph, step: Graph) -> I64:
    """Returns the ops [M] of `graph` that those of `step` are copies of; for sums and collectives one of the group."""
    if step is graph:
        return np.arange(graph.num_ops)
    number = {name: op for op, name in enumerate(graph.op_names)}
    origin = np.array([number.get(base_name(name), -1) for name in step.op_names], np.int64)
    groups = step.groups
    is_made = (origin < 0) & (groups >= 0)
    of_group = np.full(int(groups.max(initial=-1)) + 1, -1)
    is_known = (origin >= 0) & (groups >= 0)
    of_group[groups[is_known]] = origin[is_known]
    origin[is_made] = of_group[groups[is_made]]
    assert (origin >= 0).all(), "sums and collectives are in the group of an update"
    return origin
