"""Tensor files: safetensors with one line of JSON, the header, under `gdp` in their metadata. Readers raise InputError
with one line that names the file, the fault and the remedy."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError, safe_open

from gdp import files
from gdp.errors import InputError, prefixed


@dataclass(frozen=True, eq=False)
class TensorFormat:
    """A kind of tensor file: its header's fields, and the words of its errors."""

    name: str  # in the header's field `format`
    version: int
    fields: Mapping[str, Callable[[object], bool]]  # checks of the header's fields, beside format and version
    writer: str  # of good files: "`gdp train`"
    remedy: str  # for a damaged file: "copy or train it again"

    def header(self, **values: Any) -> dict[str, str]:
        """Returns the metadata with a header of these `values`."""
        return {"gdp": orjson.dumps({"format": self.name, "version": self.version, **values}).decode()}

    @contextmanager
    def opened(self, path: str | Path, framework: str) -> Iterator[tuple[Mapping[str, Any], Any]]:
        """Yields (header, the open file), with tensors of `framework`, "pt" or "numpy". Raises InputError for a bad
        file, and adds the file's name to an InputError raised meanwhile."""
        try:
            with files.explained(path):
                if Path(path).is_dir():
                    raise IsADirectoryError
                with prefixed(path), safe_open(path, framework=framework) as file:
                    yield self._header_of(file.metadata()), file
        except SafetensorError:
            raise InputError(f"{path}: truncated, or no safetensors file; {self.remedy}") from None

    def _header_of(self, metadata: Mapping[str, str] | None) -> Mapping[str, Any]:
        text = (metadata or {}).get("gdp")
        if text is None:
            raise InputError(f"has no gdp header; name a file that {self.writer} wrote")
        try:
            document = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise InputError(f"its gdp header is not JSON; {self.remedy}") from None
        header = files.require_header(document, self.name, self.version)
        expected = {"format": files.is_string, "version": files.is_size, **self.fields}
        files.require_keys(header, "header", expected, set(expected))
        return header
