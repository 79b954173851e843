"""The columns of a graph: the field of records, and of `gdp-graph` files, that each one has the values of."""

OP_COLUMNS = {
    "name": "op_names",
    "kind": "kinds",
    "flops": "flops",
    "bytes_accessed": "bytes_accessed",
    "dtype": "dtypes",
    "resident_bytes": "resident_bytes",
    "phase": "phases",
    "module": "modules",
    "group": "groups",
    "time_ns": "times_ns",
    "origin": "origins",
    "microbatch": "microbatches",
    "replica": "replicas",
    "role": "roles",
    "kernels": "kernels",
    "host_ns": "host_ns",
    "host_waits": "host_waits",
    "shapes": "shapes",
}  # the column of each field of ops, in the order of the fields
TENSOR_COLUMNS = {
    "producer": "producers",
    "consumers": "consumers",
    "bytes": "tensor_bytes",
    "resident": "is_resident",
    "keep": "is_kept",
    "view_of": "view_of",
}  # the column of each field of tensors, in the order of the fields

TEXTS = "op_names", "kinds", "dtypes", "phases", "modules", "roles", "shapes"
NUMBERS = "flops", "bytes_accessed", "resident_bytes", "groups", "origins", "microbatches", "replicas"
OF_TENSORS = "producers", "tensor_bytes", "is_resident", "is_kept", "view_of"
"""Columns with a text for each op, a number for each op, and a value for each tensor."""
OF_HOSTS = {"kernels": 1, "host_ns": 0, "host_waits": False}
"""Columns of ops for hosts, with the values of ops that tell nothing."""
OPTIONAL = OF_HOSTS | {"shapes": ""}
"""Columns that files and fingerprints lack where no op tells anything, with the values of such ops."""
