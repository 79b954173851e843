"""Parses, calls and prints: `gdp devices`. A command imports what it needs when it runs."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli.options import DevicesOption, JsonOption
from gdp.cli.shared import check_writable, log, print_json, print_text, show
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.cluster.detect import Detected, Link, Machine
    from gdp.execute.calibrate.calibrate import Calibration

devices_app = typer.Typer(
    help="Built-in kinds of devices, what a DEVICES text stands for, and the devices of this machine.",
    rich_markup_mode=None,
)


@devices_app.command("list")
def devices_list() -> int:
    """List the built-in kinds of devices and links."""
    from gdp.report import listings

    show(listings.kinds_report())
    return 0


@devices_app.command("show")
def devices_show(
    devices: Annotated[str, typer.Argument(metavar="DEVICES")],
    json: Annotated[bool, typer.Option("--json", help="Print it as a gdp-cluster document.")] = False,
) -> int:
    """Show the devices and routes that DEVICES stands for."""
    from gdp.cluster import Cluster

    cluster = Cluster.parse(devices)
    if json:
        print_json(cluster.to_document())
    else:
        from gdp.report import listings

        show(listings.cluster_report(cluster))
    return 0


@devices_app.command("detect")
def devices_detect(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a cluster file, with estimated figures.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Show the devices of this machine, by their names in gdp run, and the links between them."""
    if out is not None:
        check_writable(out)
    from gdp.report.progress import live

    with live("looking for devices"):
        import torch

        from gdp.cluster import Cluster
        from gdp.cluster.detect import detect
        from gdp.cluster.detect.host import available_cores

        machine, cores = detect(), available_cores()
    if out is not None:
        Cluster.of_machine(machine).save(out)
    if json:
        document = {
            "devices": [_device_document(machine, device) for device in machine.devices],
            "links": [_link_document(names, link) for names, link in machine.links.items()],
            "memory_bytes": machine.memory_bytes,
            "notes": machine.notes,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cores": cores,
        }
        print_json(document if out is None else document | {"path": str(out)})
        return 0
    from gdp.notebook import format_gib
    from gdp.report import listings

    show(listings.rows_report([_device_row(machine, device) for device in machine.devices]))
    if machine.links:
        print_text("")
        show(listings.rows_report([{"from": a, "to": b, "link": link} for (a, b), link in machine.links.items()]))
    print_text(
        f"\nPyTorch {torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'}; "
        f"processor cores: {', '.join(map(str, cores)) or 'any'}; memory {format_gib(machine.memory_bytes)}"
    )
    print_text("\n".join(f"note: {note}" for note in machine.notes))
    print_text(
        f"Written to {out}"
        if out
        else "--devices local means these devices; gdp devices detect --out FILE writes them to a file"
    )
    return 0


def _device_row(machine: "Machine", device: "Detected") -> dict[str, object]:
    from gdp.notebook import format_gib

    place = {"memory": format_gib(device.memory_bytes), "on": device.place}
    row: dict[str, object] = {"device": device.name, "kind": device.kind, **place}
    if not machine.gpus:
        return row
    gpu = machine.gpus.get(device.name)
    sizes = {"total": gpu.total_bytes, "free": gpu.free_bytes} if gpu else {"total": None, "free": None}
    texts = {name: None if size is None else format_gib(size) for name, size in sizes.items()}
    return row | texts | {"slot": gpu.pcie or None if gpu else None}


def _device_document(machine: "Machine", device: "Detected") -> dict[str, object]:
    figures = {"memory_bytes": device.memory_bytes, "on": device.place}
    document: dict[str, object] = {"name": device.name, "kind": device.kind, **figures}
    gpu = machine.gpus.get(device.name)
    if gpu is None:
        return document
    return document | {
        "gpu": gpu.name,
        "uuid": gpu.uuid or None,
        "total_memory_bytes": gpu.total_bytes,
        "free_memory_bytes": gpu.free_bytes,
        "used_by_others_bytes": gpu.others_bytes,
        "pcie_generation": gpu.pcie_generation,
        "pcie_width": gpu.pcie_width,
    }


def _link_document(names: tuple[str, str], link: "Link") -> dict[str, object]:
    traits = {"is_switched": link.is_switched, "has_peer_copies": link.has_peer_copies}
    figures = {"nvlinks": link.num_nvlinks, **traits, "bytes_per_second": link.bytes_per_second}
    return {"devices": names, "ancestor": link.ancestor or None, **figures}


@devices_app.command("measure")
def devices_measure(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The cluster file to write, such as local.yaml.")],
    devices: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Some of the devices that detect shows. Default: all.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Rougher figures, in seconds.")] = False,
    json: JsonOption = False,
) -> int:
    """Measure the devices of this machine and the routes between them, and write them to a cluster file.

    Under torchrun each process measures a device, and the routes are those between the processes."""
    check_writable(out)
    from gdp.cluster.detect import detect
    from gdp.execute.calibrate.calibrate import calibrate
    from gdp.execute.plan_executor import ExecutionError

    machine = detect()
    chosen, (found, routes) = _choose(machine.devices, devices), machine.cluster()
    known_routes = {(found[a].name, found[b].name): route for (a, b), route in routes.items()}
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            calibration = _measure_ranks(chosen, quick)
        else:
            calibration = calibrate(
                chosen, known_routes=known_routes, quick=quick, on_progress=lambda text: log(f"gdp: measuring {text}")
            )
    except ExecutionError as error:
        raise InputError(f"{error}; leave the device out with --devices") from None
    if calibration is None:
        return 0  # the first rank reports
    cluster = calibration.cluster
    cluster.save(out)
    if json:
        known = {"cluster": cluster.to_document(), "fingerprint": cluster.fingerprint}
        print_json({**known, "notes": calibration.notes, "path": str(out)})
        return 0
    from gdp.report import listings

    show(listings.cluster_report(cluster))
    print_text("\nThese figures hold while all devices work at the same time.")
    print_text("\n".join(["", *(f"note: {note}" for note in calibration.notes), f"Written to {out}"]))
    return 0


@devices_app.command("fit")
def devices_fit(
    runs: Annotated[
        Path, typer.Option(metavar="FILE", help="CSV, YAML or JSON of rows: model, ms, devices, runtime, batch, ...")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The cluster file to write, such as mine.yaml.")],
    devices: DevicesOption = None,
    json: JsonOption = False,
) -> int:
    """Fit what cards, their host and links achieve to steps that you measured, and write it to a cluster file.

    A row has the time of a step in ms, and options of gdp place by their names."""
    check_writable(out)
    from dataclasses import replace

    from gdp.cluster import Cluster
    from gdp.cluster.device import EAGER, split_runtime
    from gdp.planning.machine_fit import fit_machine
    from gdp.planning.measured_steps import read_steps
    from gdp.report import listings
    from gdp.report.progress import live

    steps = read_steps(runs, devices)
    widest = max((step.cluster for step in steps), key=lambda cluster: cluster.num_devices)
    with live("fitting the machine to measured steps"):
        widest = replace(widest.run_by(EAGER), name=split_runtime(widest.name)[0])
        fit = fit_machine(steps, Cluster.parse(devices) if devices else widest)
    fit.fitted.save(out)
    if json:
        cluster = {"cluster": fit.fitted.to_document(), "fingerprint": fit.fitted.fingerprint}
        print_json(cluster | {"numbers": fit.number_rows(), "rows": fit.step_rows(), "path": str(out)})
        return 0
    show(listings.rows_report(fit.number_rows()))
    print_text("")
    percent = ("before", "after", "left_out")
    show(listings.rows_report([row | {key: f"{row[key]:+.1%}" for key in percent} for row in fit.step_rows()]))
    print_text("\nErrors are those of predicted times; left_out: with numbers that the other rows set.")
    for row in fit.disagreeing:
        print_text(
            f"warning: {steps[row].where} disagrees with the others; check its options, what else the machine did and "
            "whether the first steps are in its time, or leave it out"
        )
    if kinds := fit.kinds_without_rows:
        print_text(f"warning: no row is of {', '.join(kinds)}, whose numbers are as they were")
    if kinds := fit.kinds_elsewhere:
        print_text(f"warning: {out} has no {', '.join(kinds)}, which rows have; name all devices with --devices")
    for kind, what in fit.unlikely:
        print_text(
            f"warning: {what} of {kind} is {fit.factors[kind, what]:.3g} times what it is elsewhere, beyond three "
            "deviations; check that rows have the time of steps alone, as their columns say"
        )
    print_text(f"Written to {out}; use it with --devices {out}")
    return 0


def _measure_ranks(devices: "list[Detected]", quick: bool) -> "Calibration | None":
    """Measures with a process for each device."""
    from gdp.execute.calibrate.over_ranks import calibrate_ranks, rank_names
    from gdp.execute.ranks.ranks import join_or_leave

    names, places = rank_names(devices)
    with join_or_leave(names, places) as ranks:

        def say(text: str) -> None:
            if ranks.is_first:
                log(f"gdp: measuring {text}")

        device = devices[int(os.environ["LOCAL_RANK"]) % len(devices)]
        return calibrate_ranks(ranks, device, quick=quick, on_progress=say)


def _choose(devices: "tuple[Detected, ...]", text: str | None) -> "list[Detected]":
    """Returns the devices named as in `cpu0,cpu1`, in this order."""
    from gdp.errors import suggest

    by_name = {device.name: device for device in devices}
    names = list(by_name) if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in by_name:
            raise InputError(f"--devices {name!r}: there is no such device here; {suggest(name, list(by_name))}")
        if names.count(name) > 1:
            raise InputError(f"--devices {name!r} is named twice; name it once")
    return [by_name[name] for name in names]
