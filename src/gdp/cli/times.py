"""Parses, calls and prints: `gdp times`, which makes files of measured times from what others measured."""

from pathlib import Path
from typing import Annotated

import typer

from gdp.cli.options import ReadingOptions, with_options
from gdp.cli.shared import OK, check_times_file, log, print_text, refuse_beside, show
from gdp.errors import InputError, prefixed

times_app = typer.Typer(help="Measured times of ops, for `gdp place --times`.", rich_markup_mode=None)


@times_app.command("import")
@with_options
def times_import(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="What torch.profiler's export_chrome_trace wrote: .json or .json.gz."),
    ],
    model: Annotated[str, typer.Option("--for", metavar="MODEL", help="The model whose steps were profiled.")],
    device: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="The device they ran on, such as rtx4090-24g. Default: the card in TRACE."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file of times; one that exists gets more.")] = Path(
        "times.db"
    ),
    *,
    model_options: ReadingOptions,
) -> int:
    """Read the times of MODEL's ops from a trace of torch.profiler, made with record_shapes=True."""
    from gdp.cluster import Cluster
    from gdp.cluster.catalogue import KINDS
    from gdp.cluster.detect.gpu_figures import kind_of
    from gdp.cluster.detect.nvml import Gpu
    from gdp.costs.rates import gap_ns
    from gdp.models.measured_times import MeasuredTimes
    from gdp.models.pytorch.profiler_trace import ProfilerTrace
    from gdp.models.pytorch.signature import LIBRARY
    from gdp.models.source import ModelSource
    from gdp.report.progress import live
    from gdp.report.tables import format_ms, new_table, short

    refuse_beside("--for, of which one batch is read (--batch)", {"--microbatches": model_options.microbatches > 1})
    check_times_file(out)
    read, kinds = ProfilerTrace(trace), {one.kind: one for one in Cluster.parse(device).devices} if device else {}
    if len(kinds) > 1:
        raise InputError(f"--device {device}: has devices of {len(kinds)} kinds; name the one that was profiled")
    if (kind := next(iter(kinds), kind_of(Gpu(read.card)) if read.card else None)) is None:
        raise InputError(f"{trace}: does not say what it ran on; name it with --device, such as cpu-16core or local")
    if kinds and kinds[kind].is_cpu == bool(read.kernels):
        remedy = "name their card with --device" if read.kernels else "profile with ProfilerActivity.CUDA too"
        raise InputError(f"{trace}: has {len(read.kernels):,} kernels, and --device is {kind}; {remedy}")
    own = kind_of(Gpu(read.card)) if read.card else kind
    if own in KINDS and own != kind:
        raise InputError(f"--device {device}: {trace} is of {own}; leave --device out")
    source = ModelSource(model, model_options.reading())
    with live(f"reading {model}"):
        capture = source.capture()
    card = kinds.get(kind) or (Cluster.parse(kind).devices[0] if kind in KINDS else None)
    with prefixed(trace):
        found = read.times(capture.program, gap_ns(card) if card is not None and read.kernels else 0.0)
    of_ops = f"{found.num_matched:,} of {found.num_matched + found.unmatched.total():,} ops of {model}"
    if found.num_matched < max(found.unmatched.total(), 1):
        raise InputError(f"{trace}: has times of {of_ops}; name the model, its options and batch, as profiled (eager)")
    if not read.has_sizes:
        log("gdp: note: the trace tells no sizes, so its batch cannot be checked; profile with record_shapes=True")
    stored = MeasuredTimes(out, create=True)
    stored.store(kind, LIBRARY, found.op_times)
    if (samples := source.batch_size) is not None:
        stored.note_samples(source.text, samples)
    print_text(f"{of_ops} have times; steps in the trace: {len(read.steps) or 'not marked'}")
    if found.unmatched:
        kinds_text = ", ".join(f"{count:,} {name}" for name, count in found.unmatched.most_common())
        print_text(f"As the cost model says, without a time: {kinds_text}")
    if found.rest_us:
        what, share = "kernels" if read.kernels else "CPU ops", sum(found.rest_us.values()) / found.total_us
        print_text(f"{share:.1%} of the time of {what} belongs to no op; the longest:\n")
        longest = sorted(found.rest_us.items(), key=lambda item: -item[1])[:5]
        rows = [(short(name), format_ms(round(time_us * 1e3))) for name, time_us in longest]
        show([new_table(what, ">time", rows=rows)])
    log(f"gdp: op times on {kind} are in {out}; use them with gdp place --times {out}")
    return OK
