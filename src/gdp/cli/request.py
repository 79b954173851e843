"""What `gdp place` is asked: the model, the devices and how to search, read from options and checked."""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdp.cli.inputs import read_graph, read_timed
from gdp.cli.shared import log
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.budget import Budget
    from gdp.cluster import Cluster
    from gdp.constraints import Constraints
    from gdp.export.target import Target
    from gdp.graph import Graph
    from gdp.sources import Model, Reading


@dataclass(frozen=True, eq=False)
class PlaceRequest:
    """A question."""

    model: str
    devices: str
    cluster: "Cluster"
    budget: "Budget"
    constraints: "Constraints"
    reading: "Reading"
    times: Path | None
    placer: str
    checkpoint: str | None
    seed: int
    robust: float | None
    threads: int | None
    with_cache: bool
    with_advice: bool
    out: Path | None
    json: bool
    target: "Target | None"
    limits: tuple[str, ...]  # the options that `constraints` were given by

    def read(self) -> "Model":
        """The model's graph, with measured times if there are."""
        if self.times is None:
            return read_graph(self.model, self.reading)
        return read_timed(self.model, self.times, self.cluster, self.reading)

    def read_split(self, microbatches: int, samples_by: int = 1) -> "Graph":
        """The model's step of so many micro-batches, with one in `samples_by` of the samples."""
        from gdp.sources import read_part

        microbatching = replace(self.reading.microbatching, count=microbatches)
        return microbatching.apply(read_part(self.model, self.reading, microbatches * samples_by))

    @property
    def can_split(self) -> bool:
        """Whether the model has a batch that can be split, and so read anew."""
        from gdp.sources import has_samples

        return self.times is None and has_samples(self.model)

    def under_measured_noise(self, noise: float | None) -> "PlaceRequest":
        """With plans judged under the spread of measured op times, if nothing else was asked for."""
        if noise is None or self.robust is not None:
            return self
        return replace(self, robust=min(round(noise, 4), 0.49))

    def cache_entry(self, graph: "Graph") -> Path | None:
        """Where the answer is kept."""
        if not self.with_cache:
            return None
        from gdp import files, plan_cache
        from gdp.simulate import default_threads

        policy = None if self.checkpoint is None else hashlib.sha256(files.read_bytes(self.checkpoint)).hexdigest()
        options = {
            "placer": self.placer, "budget": str(self.budget), "policy": policy, "advice": self.with_advice,
            "target": None if self.target is None else self.target.name,
            "seed": self.seed, "robust": self.robust, "threads": self.threads or default_threads(),
        }  # fmt: skip
        return plan_cache.entry(graph, self.cluster, self.constraints, options)

    @property
    def keywords(self) -> dict[str, Any]:
        """What `place` and `sweep_...` both take."""
        return {"seed": self.seed, "robust": self.robust, "num_threads": self.threads}

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Errors say of which model and devices they are."""
        try:
            yield
        except InputError as error:
            raise InputError(f"{self.model} on {self.devices}: {error}") from None

    def say_notes(self, graph: "Graph") -> None:
        """What the user may have meant otherwise."""
        from gdp.cost import unused_names

        if self.is_local:
            log("gdp: note: devices as they are now; gdp devices detect shows them, and which figures are estimates")
        for sentence in unused_names(graph, self.cluster):
            log(f"gdp: note: {sentence}")
        if self.times is not None and not any(graph.times_ns):
            kinds = ", ".join(sorted({device.kind for device in self.cluster.devices}))
            log(
                f"gdp: note: {self.times} has no time of these ops on {kinds} with this PyTorch: the roofline gives all"
            )

    @property
    def is_local(self) -> bool:
        """Whether the devices are those of this machine."""
        return self.devices.strip() == "local"
