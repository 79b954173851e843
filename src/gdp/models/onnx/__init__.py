"""ONNX: the graph of a file, one step of inference, from shapes alone."""
