"""ONNX: the graph of a file, one step of inference, from shapes alone."""

from gdp.errors import InputError

try:
    import onnx  # noqa: F401
except ImportError:
    raise InputError("reading ONNX files needs onnx; pip install 'gdp-placement[onnx]'") from None
