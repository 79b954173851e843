"""Targets: the real devices that the devices of a plan stand for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gdp.cluster.detect import Detected, host
from gdp.errors import InputError

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Target:
    """A device of a plan and where it runs: pinned to processor cores, or on a GPU."""

    name: str  # in the plan
    device: torch.device
    cores: tuple[int, ...] = ()  # of a CPU; () is not pinned

    @property
    def place(self) -> str:
        """Returns the place in words: `core 1`, `cores 0-3`, `any core`, `cuda:0`."""
        if self.device.type != "cpu":
            return str(self.device)
        if not self.cores:
            return "any core"
        first, last = self.cores[0], self.cores[-1]
        return f"core {first}" if first == last else f"cores {first}-{last}"

    @property
    def num_threads(self) -> int:
        """Number of intra-op threads."""
        return max(len(self.cores), 1)


def find_targets(
    names: Sequence[str], on: str | Sequence[str] | None = None, *, option: str = "on"
) -> tuple[Target, ...]:
    """[D] Returns the target of each device of a plan. `on` has the place of each device in turn: `cpu` (any core),
    `cpu:1` (that core), `cpu:0-3` (these), `cuda:0`; or is a text of them, with commas between. Without it names are
    places: `cpu1` is core 1, `cuda0` is GPU 0; beside GPUs, a `cpu0` that is the only CPU has all cores. InputError for
    a place that is not there; `option` is what the user calls `on`: `--on` on a command line."""
    on = on.split(",") if isinstance(on, str) else on
    if on is not None and len(on) != len(names):
        raise InputError(f"{option} names {len(on)} devices; the plan has {len(names)}, name each: {', '.join(names)}")
    places = places_of(names, option) if on is None else [text.strip() for text in on]
    return tuple(_target(name, place, option) for name, place in zip(names, places, strict=True))


def places_of(names: Sequence[str], option: str = "on") -> list[str]:
    """[D] Returns the places of devices of these names, as in `find_targets`."""
    places = [_place_of(name, option) for name in names]
    cpus = [number for number, place in enumerate(places) if place.startswith("cpu:")]
    if len(cpus) == 1 < len(places) and places[cpus[0]] == "cpu:0":
        places[cpus[0]] = host.run_place(host.all_cores())  # as gdp devices detect has it beside GPUs
    return places


def _place_of(name: str, option: str) -> str:
    if match := re.fullmatch(r"(cpu|cuda|gpu)[-_:]?(\d+)", name):
        return f"{'cpu' if match[1] == 'cpu' else 'cuda'}:{match[2]}"
    examples = "--on cpu:0,cpu:1 or --on cpu:0,cuda:0" if option == "--on" else 'on=["cpu:0", "cuda:0"]'
    raise InputError(
        f"device {name!r} of the plan: nothing on this machine is called so; say where it runs, as in {examples}"
    )


def _target(name: str, place: str, option: str) -> Target:
    if place == "cpu":
        return Target(name, CPU)
    match = re.fullmatch(r"(cpu|cuda):(\d+)(?:-(\d+))?", place)
    if match is None or (match[1] == "cuda" and match[3]):
        raise InputError(f"{option} {place!r}: cpu, cpu:1, cpu:0-3 or cuda:0 is expected")
    first, last = int(match[2]), int(match[3] or match[2])
    if match[1] == "cuda":
        count = torch.cuda.device_count()
        if first >= count:
            raise InputError(
                f"device {name!r} of the plan: there is no {place} here, but {count} CUDA devices; name what there is "
                f"by {option}, such as cpu for any core"
            )
        return Target(name, torch.device("cuda", first))
    cores, here = tuple(range(first, last + 1)), host.available_cores()
    if not cores or (here and not set(cores) <= set(here)):
        listed = ", ".join(map(str, here))
        raise InputError(f"device {name!r} of the plan: there is no {place} here; cores: {listed}; see {option}")
    return Target(name, CPU, cores)


def target_of(device: Detected) -> Target:
    """Returns the target of a device of this machine. InputError if it has gone away."""
    return find_targets([device.name], [device.place])[0]
