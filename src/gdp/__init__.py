"""gdp places the operators of a neural network on devices so that one step is as fast as possible within memory.
`__init__.pyi` lists the public names. They load on first use: `import gdp` alone imports neither NumPy nor PyTorch."""

from typing import Any

import lazy_loader as _lazy

_load, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gdp-placement")
    try:
        return _load(name)
    except AttributeError:
        from gdp.errors import suggest

        raise AttributeError(f"gdp has no {name!r}; {suggest(name, __all__)}") from None
