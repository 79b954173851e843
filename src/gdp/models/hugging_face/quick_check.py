"""Checks of a Transformers config that need neither PyTorch nor Transformers: the library's files name its classes."""

import re
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gdp.errors import InputError, suggest

_OWN_CODE = "; its auto_map names code, which is never run from a directory: give it as module:function"


def check_names(config: Mapping[str, Any], text: str) -> None:
    """Raises InputError for a model type or an architecture that no file of the installed Transformers names.

    What the files do not tell is left to the library: nothing is refused here that it knows.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise InputError(f'{text}: config.json has no model_type; add the one of Transformers, such as "bert"')
    try:
        found = find_spec("transformers")
    except ValueError:  # taken away by a caller
        return
    if found is None or found.origin is None:
        return
    models, own_code = Path(found.origin).parent / "models", _OWN_CODE if config.get("auto_map") else ""
    try:
        listed = (models / "auto" / "auto_mappings.py").read_text()
    except OSError:
        return
    kinds = sorted(set(re.findall(r'\("([\w.-]+)", "\w+Config"\)', listed)))
    if kinds and kind not in kinds and f'"{kind}"' not in (models / "auto" / "configuration_auto.py").read_text():
        raise InputError(
            f"{text}: model_type {kind!r} is unknown to Transformers {version('transformers')}; "
            f"{suggest(kind, kinds)}{own_code}"
        )
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str) and not _is_defined(names[0], models):
        raise InputError(
            f"{text}: architectures names {names[0]!r}, no model class of Transformers {version('transformers')}; "
            f"correct it, or remove it for the bare model{own_code}"
        )


def _is_defined(name: str, models: Path) -> bool:
    """Returns whether a file of the library defines or lists the class `name`."""
    if f'"{name}"' in (models / "auto" / "modeling_auto.py").read_text():
        return True
    definition = f"class {name}("
    return any(definition in path.read_text() for path in models.glob("*/modeling_*.py"))
