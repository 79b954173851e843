"""`gdp devices`: parse, call, print. What a command needs is imported when it runs."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli_shared import JsonOption, log, print_json, print_text, show
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.execute.calibration import Calibration
    from gdp.execute.local_devices import LocalDevice

devices_app = typer.Typer(
    help="Built-in kinds of devices, what a DEVICES text stands for, and the devices of this machine.",
    rich_markup_mode=None,
)


@devices_app.command("list")
def devices_list() -> int:
    """The built-in kinds of devices and links."""
    from gdp.report import console

    show(console.kinds_report())
    return 0


@devices_app.command("show")
def devices_show(
    devices: Annotated[str, typer.Argument(metavar="DEVICES")],
    json: Annotated[bool, typer.Option("--json", help="Print it as a gdp-cluster document.")] = False,
) -> int:
    """The devices and routes that DEVICES stands for."""
    from gdp.cluster import Cluster

    cluster = Cluster.parse(devices)
    if json:
        print_json(cluster.to_document())
    else:
        from gdp.report import console

        show(console.cluster_report(cluster))
    return 0


@devices_app.command("detect")
def devices_detect(json: JsonOption = False) -> int:
    """The devices of this machine, by the names that gdp run knows them by."""
    import torch

    from gdp.execute.local_devices import detect_local
    from gdp.execute.targets import available_cores

    found, cores = detect_local(), available_cores()
    if json:
        devices = [
            {"name": device.name, "kind": device.kind, "memory_bytes": device.memory_bytes, "on": device.place}
            for device in found
        ]
        print_json({"devices": devices, "torch": torch.__version__, "cuda": torch.version.cuda, "cores": cores})
        return 0
    from gdp.report import console

    rows = [
        {"device": item.name, "kind": item.kind, "memory": console.format_gib(item.memory_bytes), "on": item.place}
        for item in found
    ]
    show(console.rows_report(rows))
    print_text(
        f"\nPyTorch {torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'}; "
        f"processor cores: {', '.join(map(str, cores)) or 'any'}\nTheir figures: gdp devices measure --out local.yaml"
    )
    return 0


@devices_app.command("measure")
def devices_measure(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The cluster file to write, such as local.yaml.")],
    devices: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Of those that detect shows; default: all.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Rougher figures, in seconds.")] = False,
    json: JsonOption = False,
) -> int:
    """Measure the devices of this machine and the routes between them, and write them to a cluster file.

    Under torchrun each process measures a device, and the routes are those between the processes.
    """
    from gdp import options

    options.check_writable(out)
    from gdp.execute.calibration import calibrate
    from gdp.execute.local_devices import detect_local
    from gdp.execute.worker import ExecutionError

    chosen = _choose(detect_local(), devices)
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            found = _measure_ranks(chosen, quick)
        else:
            found = calibrate(chosen, quick=quick, on_progress=lambda text: log(f"gdp: measuring {text}"))
    except ExecutionError as error:
        raise InputError(f"{error}; leave the device out with --devices") from None
    if found is None:
        return 0  # the first rank reports
    cluster = found.cluster
    cluster.save(out)
    if json:
        print_json(
            {
                "cluster": cluster.to_document(), "fingerprint": cluster.fingerprint, "alone": dict(found.alone),
                "notes": found.notes, "fit_errors": found.fit_errors, "path": str(out),
            }
        )  # fmt: skip
        return 0
    from gdp.report import console

    show(console.cluster_report(cluster))
    print_text("\nThe figures of all devices at work at once.")
    if found.alone:
        print_text("Alone, times those:\n")
        show(console.rows_report([{"device": name, **factors} for name, factors in found.alone.items()]))
    print_text("\n".join(["", *(f"note: {note}" for note in found.notes), f"Written to {out}"]))
    return 0


def _measure_ranks(devices: "list[LocalDevice]", quick: bool) -> "Calibration | None":
    """With a process for each device."""
    from gdp.execute.calibration_ranks import calibrate_ranks, rank_names
    from gdp.execute.ranks import join_or_leave

    names, places = rank_names(devices)
    with join_or_leave(names, places) as ranks:

        def say(text: str) -> None:
            if ranks.is_first:
                log(f"gdp: measuring {text}")

        device = devices[int(os.environ["LOCAL_RANK"]) % len(devices)]
        return calibrate_ranks(ranks, device, quick=quick, on_progress=say)


def _choose(found: "tuple[LocalDevice, ...]", text: str | None) -> "list[LocalDevice]":
    """Those of `cpu0,cpu1`, in that order."""
    from gdp.devices import suggest

    by_name = {device.name: device for device in found}
    names = list(by_name) if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in by_name:
            raise InputError(f"--devices {name!r}: there is no such device here; {suggest(name, list(by_name))}")
        if names.count(name) > 1:
            raise InputError(f"--devices {name!r} is named twice; name it once")
    return [by_name[name] for name in names]
