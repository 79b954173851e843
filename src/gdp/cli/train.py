"""Parses, calls and prints: `gdp train`."""

import shlex
import sys
from functools import partial

from gdp.cli.options import JsonOption, with_options
from gdp.cli.shared import INTERRUPTED, OK, print_json, print_text, warm_up
from gdp.cli.train_options import TrainOptions


@with_options
def train(*, options: TrainOptions, json: JsonOption = False) -> int:
    """Train a policy on graphs; Ctrl-C saves."""
    from gdp.cli.training import run

    trained = run(options, shlex.join(["gdp", *sys.argv[1:]]), partial(warm_up, ("gdp-zero-shot",)))
    if json:
        print_json(trained.to_document())
    else:
        print_text(trained.to_text())
    return INTERRUPTED if trained.interrupted else OK
