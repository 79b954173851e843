"""`python -m benchmarks NAME [options]`: makes a page of `benchmarks/results` anew. The settings of a benchmark are its
options.

Each page in `pages/` is that of a benchmark, which is imported when it runs.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.benchmark import HELP, Benchmark, Setting, settings_of
from gdp.budget import Budget
from gdp.cli import main as run_commands
from gdp.cli.options import JsonOption
from gdp.cli.shared import check_writable, log, print_json, print_text

NAMES = tuple(sorted(path.stem for path in (Path(__file__).parent / "pages").glob("[!_]*.md")))

OutOption = Annotated[
    Path | None, typer.Option(metavar="PAGE|DIR", help="Write the page (.md) there; into a directory, all figures too.")
]
_SHORT = 60  # characters of a default that is shown
RowsOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep runs there; those found there are not made again.")
]


def app_of(names: Iterable[str] = NAMES) -> typer.Typer:
    """Returns the command line of the benchmarks `names`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.callback()
    def benchmarks() -> None:
        """Make a page of benchmarks/results anew."""

    for name in names:
        benchmark = benchmark_of(name)
        about = (sys.modules[benchmark.__module__].__doc__ or "").partition("\n\n")[0].partition(": ")[2]
        app.command(name, help=about[:1].upper() + about[1:])(_command(benchmark))
    return app


def benchmark_of(name: str) -> type[Benchmark]:
    """Returns the benchmark `name`, whose file is called like it."""
    module = import_module(f"benchmarks.{name.replace('-', '_')}")
    return next(item for item in vars(module).values() if isinstance(item, type) and vars(item).get("name") == name)


def main() -> int:
    """Runs the command line of this process and returns its exit status."""
    named = [word for word in sys.argv[1:] if word in NAMES]
    return run_commands(commands=app_of(named[:1] or NAMES), name="benchmarks")


def _command(benchmark: type[Benchmark]) -> Callable[..., int]:
    """Returns the function that Typer makes a command of: its parameters are the settings."""
    settings = {setting.name: setting for setting in settings_of(benchmark)}

    def command(*, out: Path | None, rows: Path | None, json: bool, **given: Any) -> int:
        values = {name: settings[name].read(value) for name, value in given.items()}
        made = benchmark(**values)
        made.check_workloads()
        for path in (rows and rows / "row.json", out and (out if out.suffix == ".md" else out / "rows" / "row.json")):
            if path is not None:
                check_writable(path)
        figures = made.run(out=out, rows=rows, say=log)
        if json:
            print_json(figures)
        else:
            print_text(figures["markdown"].rstrip())
        return 0

    parameters = [_parameter(setting) for setting in settings.values()]
    for name, annotation, default in (
        ("out", OutOption, None),
        ("rows", RowsOption, None),
        ("json", JsonOption, False),
    ):
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(setting: Setting) -> Parameter:
    is_text = setting.is_tuple or setting.kind is Budget
    kind = str if is_text else setting.kind
    default = Parameter.empty if setting.default is MISSING else setting.default
    if is_text and default is not Parameter.empty:
        default = setting.text_of(default)
    is_short = isinstance(default, str) and len(default) < _SHORT
    option = typer.Option(
        f"--{setting.name.replace('_', '-')}",
        metavar="A,B,..." if setting.is_tuple else None,
        help=HELP.get(setting.name, ""),
        show_default=is_short or not is_text,
    )
    annotation = Annotated[kind | None if default is None else kind, option]  # type: ignore[valid-type]
    return Parameter(setting.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


if __name__ == "__main__":
    sys.exit(main())
