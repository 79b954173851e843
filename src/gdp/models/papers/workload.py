"""Workloads, and the model families that workloads of any size are made of. Needs no PyTorch."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, get_type_hints

from gdp.errors import InputError, suggest

if TYPE_CHECKING:
    from gdp.models.papers.base import Example

ExpertRule = Callable[[str], int]
"""From a module path to the layer whose device the expert gives it; layer l goes to device l modulo their number."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A training workload: a model with example inputs, and the devices that it is usually placed on. `build` takes
    another batch size, if given. It draws the parameters and inputs from PyTorch's global generator, on the default
    device; under `FakeTensorMode` it allocates nothing. `expert` is None if the expert cuts the model into contiguous
    stages of about equal time instead of giving each layer a device."""

    name: str
    family: str
    cluster: str  # a preset for `Cluster.parse`
    batch_size: int
    description: str
    build: "Callable[..., Example]"
    expert: ExpertRule | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: a file of `package` with a function `build` of a config; imported when a model is built."""

    name: str  # of the file
    description: str  # names of sizes in braces
    sizes: Mapping[str, int]  # all that the description names, where a workload does not say otherwise
    package: str = "gdp.models.papers"
    layers: str = ""  # the size that counts layers which the expert gives to devices in turn; "" there are none

    def workload(self, name: str, cluster: str, batch_size: int, **sizes: int) -> Workload:
        """Returns the workload called `name` with these sizes."""
        sizes = {**self.sizes, **sizes}

        def build(samples: int = batch_size) -> "Example":
            module = import_module(f"{self.package}.{self.name}")
            config = get_type_hints(module.build)["config"]
            example: Example = module.build(config(batch_size=samples, **sizes))
            return example

        rule = layer_per_device(sizes[self.layers]) if self.layers else None
        return Workload(name, self.name, cluster, batch_size, self.description.format(**sizes), build, rule)

    def variant(self, cluster: str, batch_size: int, **sizes: int) -> Workload:
        """Returns a workload named after its sizes: the first letters of a size's words, but `num`, and its value."""
        parts = []
        for size, value in (*sizes.items(), ("batch", batch_size)):
            letters = "".join(word[0] for word in size.split("_") if word != "num")
            parts.append(f"{letters}{value}")
        return self.workload(f"{self.name}/{'-'.join(parts)}", cluster, batch_size, **sizes)


@dataclass(frozen=True, eq=False)
class Registry:
    """Workloads by name, and smaller and larger variants of them to train policies on, found by name too."""

    workloads: tuple[Workload, ...]
    variants: tuple[Workload, ...]
    large: frozenset[str]  # names of workloads that policies are not trained on

    def get(self, name: str) -> Workload:
        """Returns the workload or variant called `name`. InputError if there is none."""
        workload = self.find(name)
        if workload is None:
            raise InputError(f"workload {name!r} is not built in; one of {', '.join(self.names())} is expected")
        return workload

    def find(self, name: str) -> Workload | None:
        """Returns the workload or variant called `name`; None if there is none."""
        return self._by_name.get(name)

    def names(self) -> tuple[str, ...]:
        """Returns the names of all workloads."""
        return tuple(workload.name for workload in self.workloads)

    def variant_names(self) -> tuple[str, ...]:
        """Returns the names of all variants, family by family."""
        return tuple(variant.name for variant in self.variants)

    def family_names(self) -> tuple[str, ...]:
        """Returns the names of the model families."""
        return tuple(dict.fromkeys(workload.family for workload in self.workloads))

    def hold_out(self, families: Collection[str]) -> tuple[str, ...]:
        """Returns the names of `families`, sorted and each once. InputError for an unknown family."""
        for family in families:
            if family not in self.family_names():
                raise InputError(f"family {family!r} is unknown; {suggest(family, self.family_names())}")
        return tuple(sorted(set(families)))

    def training_set(self, held_out: Iterable[str] = ()) -> tuple[Workload, ...]:
        """Returns the workloads to pre-train a policy on: small ones and all variants, without families held out."""
        left_out = frozenset(held_out)
        candidates = (*self.workloads, *self.variants)
        return tuple(item for item in candidates if item.family not in left_out and item.name not in self.large)

    @cached_property
    def _by_name(self) -> Mapping[str, Workload]:
        return {workload.name: workload for workload in (*self.workloads, *self.variants)}


def layer_per_device(num_layers: int) -> ExpertRule:
    """Returns the expert of recurrent and transformer models: `layers.i` is layer i. An embedding goes with the first
    layer, all else (attention between encoder and decoder, softmax, loss) with the last. Source: the GDP paper's human
    experts (arXiv 1910.01578)."""

    def layer_of(module: str) -> int:
        if match := re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", module):
            return int(match[1])
        return 0 if "embedding" in module.split(".") else num_layers - 1

    return layer_of
