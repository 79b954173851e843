"""Built-in workloads, and the model families that workloads of any size are made of. Needs no PyTorch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, get_type_hints

if TYPE_CHECKING:
    from gdp.models.workloads.base import Example

ExpertRule = Callable[[str], int]
"""From a module path to the layer whose device the expert gives it; layer l goes to device l modulo their number."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A built-in training workload: a model with example inputs, and the devices that it is usually placed on.

    `build` takes another batch size, if given. It draws the parameters and inputs from PyTorch's global generator, on
    the default device; under `FakeTensorMode` it allocates nothing. `expert` is None if the expert cuts the model into
    contiguous stages of about equal time instead of giving each layer a device.
    """

    name: str
    family: str
    cluster: str  # a preset for `Cluster.parse`
    batch_size: int
    description: str
    build: "Callable[..., Example]"
    expert: ExpertRule | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: a file of this package with a function `build` of a config; imported when a model is built."""

    name: str  # of the file
    description: str  # names of sizes in braces
    sizes: Mapping[str, int]  # all that the description names, where a workload does not say otherwise
    layers: str = ""  # the size that counts layers which the expert gives to devices in turn; "" there are none

    def workload(self, name: str, cluster: str, batch_size: int, **sizes: int) -> Workload:
        """Returns the workload called `name` with these sizes."""
        sizes = {**self.sizes, **sizes}

        def build(samples: int = batch_size) -> "Example":
            module = import_module(f"gdp.models.workloads.{self.name}")
            config = get_type_hints(module.build)["config"]
            example: Example = module.build(config(batch_size=samples, **sizes))
            return example

        rule = layer_per_device(sizes[self.layers]) if self.layers else None
        return Workload(name, self.name, cluster, batch_size, self.description.format(**sizes), build, rule)


def layer_per_device(num_layers: int) -> ExpertRule:
    """Returns the expert of recurrent and transformer models: `layers.i` is layer i.

    An embedding goes with the first layer, all else (attention between encoder and decoder, softmax, loss) with the
    last. Source: the GDP paper's human experts (arXiv 1910.01578).
    """

    def layer_of(module: str) -> int:
        if match := re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", module):
            return int(match[1])
        return 0 if "embedding" in module.split(".") else num_layers - 1

    return layer_of
