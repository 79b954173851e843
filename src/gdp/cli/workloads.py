"""Parses, calls and prints: `gdp workloads`."""

from typing import Annotated

import typer

from gdp.cli.options import JsonOption
from gdp.cli.shared import OK, print_json, print_text, show


def workloads(
    variants: Annotated[
        bool, typer.Option("--variants", help="List the variants for training policies instead.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """List the built-in models."""
    from gdp.models.papers import PAPERS

    rows = [
        {
            "name": item.name,
            "family": item.family,
            "devices": item.cluster,
            "batch": item.batch_size,
            "description": item.description,
        }
        for item in map(PAPERS.get, PAPERS.variant_names() if variants else PAPERS.names())
    ]
    if json:
        print_json({"workloads": rows})
    else:
        from gdp.report import listings

        show(listings.rows_report(rows))
        if not variants:
            count = len(PAPERS.variant_names())
            print_text(f"\nMODEL may also be one of {count} smaller and larger variants: gdp workloads --variants")
    return OK
