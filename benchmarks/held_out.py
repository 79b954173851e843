"""Checkpoints that have not seen a model family, and the choice among them for a workload."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads import with_relatives, workloads
from gdp.errors import InputError
from gdp.policy.checkpoint import read_checkpoint


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A checkpoint and the facts in its manifest."""

    path: Path
    families: frozenset[str]  # held out
    graphs: frozenset[str]  # names of those it was trained on
    updates: int
    cpu_hours: float

    @classmethod
    def read(cls, path: Path) -> "HeldOut":
        """Returns the checkpoint `path`; one that was trained on no built-in workload holds all families out.

        InputError for a bad file, or one that was trained on a family held out.
        """
        manifest = read_checkpoint(path).manifest
        graphs = frozenset(graph["name"] for graph in manifest.get("graphs", ()))
        is_new_to_all = bool(graphs) and not any(workloads.find(name) for name in graphs)
        checkpoint = cls(
            path=path,
            families=frozenset(workloads.family_names() if is_new_to_all else manifest.get("held_out", ())),
            graphs=graphs,
            updates=manifest.get("updates", 0),
            cpu_hours=manifest.get("cpu_hours", 0.0),
        )
        for name in sorted(checkpoint.graphs):
            workload = workloads.find(name)
            if workload is not None and workload.family in checkpoint.families:
                raise InputError(f"{path}: was trained on {name}, of a family that it should hold out; train it again")
        return checkpoint

    def to_document(self) -> dict[str, Any]:
        """Returns the families held out and the cost of training."""
        return {
            "path": str(self.path),
            "held_out": sorted(self.families),
            "updates": self.updates,
            "cpu_hours": self.cpu_hours,
        }


def checkpoints_in(directory: Path) -> list[HeldOut]:
    """Returns all checkpoints (`*.safetensors`) of a directory, by name."""
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; name one with checkpoints of `gdp train --hold-out`")
    return [HeldOut.read(path) for path in sorted(directory.glob("*.safetensors"))]


def choose(checkpoints: list[HeldOut], workload: str, directory: Path) -> HeldOut:
    """Returns the checkpoint for `workload`: it holds the family and its relatives out, and as little else as possible.

    Of several, the one with the most updates. InputError if there is none.
    """
    family = workloads.get(workload).family
    wanted = with_relatives(family)
    fitting = [checkpoint for checkpoint in checkpoints if wanted <= checkpoint.families]
    if not fitting:
        raise InputError(
            f"{directory}: no checkpoint there holds family {family} out, which {workload} needs; make it with: "
            f"gdp train training-set --randomize --hold-out {family} --out {directory / family}.safetensors"
        )
    return min(fitting, key=lambda one: (len(one.families), -one.updates, one.path.name))
