"""Orders of micro-batches with replicas: gradients of weights that only a sum over replicas waits for may wait too."""

import numpy as np
import pytest
from tests.graph.test_microbatches import two_stages

from gdp.graph import Graph
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.simulator.orders import only_for_updates


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 1000])
def test_gradients_of_weights_may_wait_for_the_sum(zero: int, bucket_bytes: int) -> None:
    """With replicas the same ops may wait as without, whether a bucket has one gradient or both."""

    def waiting(graph: Graph) -> set[str]:
        phases = np.array(graph.phases)
        can_wait = only_for_updates(graph, phases == "backward", phases == "update")
        return {graph.op_names[op] for op in np.flatnonzero(can_wait)}

    # b0 reaches w0 alone
    stems = {"b0", "b0@1", "w0", "w0@1", "w1", "w1@1", "u0.accumulate@1", "u1.accumulate@1"}
    assert waiting(two_stages(2).graph) == stems
    step = Step.of(two_stages(1).graph, Layout((2, 2), zero), bucket_bytes=bucket_bytes)
    assert waiting(step.graph) == stems | {f"{name}#1" for name in stems}
