"""Tables of ops: matrix products and fused attention in bfloat16, each replayed from a CUDA graph.

An op is what a capture makes of it: shapes, FLOPs as in `gdp.models.pytorch.flops`, and bytes of all arguments and
results; but what a replay touches stays in the card's cache until the next one if all of it fits.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.measured_sources.source import (
    DATA,
    CapturedGraphs,
    MeasuredRow,
    MeasuredSource,
    PredictedRow,
    on_one_card,
    read_table,
)
from gdp.cluster.achieved import figures_of_kind
from gdp.cluster.device import CUDA_GRAPHS
from gdp.graph import Graph, Op
from gdp.graph.shapes import Array, call_text

CARDS = {"a100-sxm": "a100-sxm-80g", "h100-sxm": "h100-sxm-80g", "l40s": "l40s-48g"}
HEAD_WIDTH, ELEMENT_BYTES, SUM_BYTES = 128, 2, 4  # of all rows; a row of scores leaves its sum in float32
_SOFTMAX_FLOPS = 5  # of a pair of query and key
_LAYERS = 6  # of aiconfigurator's collect_gemm.py: each has weights of its own, and all read the same rows


class OpTable(MeasuredSource):
    """One op a row."""

    sets_all = True

    def predict(self, row: MeasuredRow, graphs: CapturedGraphs) -> PredictedRow:
        """Predicts the op alone on the card."""
        op: Op = row.case
        simulation = on_one_card(Graph.build(op.name, [op], []), row.card, row.runtime)
        return PredictedRow(row, simulation.step_time_ns / 1e6, op.name)


def _read_bytes(num_bytes: int, replayed_bytes: int, card: str) -> int:
    """Returns how many of an op's bytes are not in the cache of `card`: none where a replay fits; all at 1.2 of it."""
    held = replayed_bytes / figures_of_kind(card).achieved["cache_bytes"]
    return round(num_bytes * min(max((held - 1) / 0.2, 0), 1))


class ProductTable(OpTable):
    """Matrix products [m, k] x [k, n]."""

    name = "products"
    about = "matrix products of aiconfigurator's tables"

    def rows(self) -> list[MeasuredRow]:
        """Returns the products of all cards."""
        return [row for table, card in CARDS.items() for row in self._of_card(table, card)]

    def _of_card(self, table: str, card: str) -> Iterator[MeasuredRow]:
        for line in read_table(DATA / f"gemm-{table}.csv", ("m", "n", "k", "us")):
            m, n, k = (int(line[name]) for name in ("m", "n", "k"))
            kind = "up to 64 rows" if m <= 64 else "up to 1,024 rows" if m <= 1024 else "more rows"
            rows, weights, results = (Array("bfloat16", size) for size in ((m, k), (k, n), (m, n)))
            io_bytes, weight_bytes = ELEMENT_BYTES * (m * k + m * n), ELEMENT_BYTES * k * n
            op = Op(
                kind,
                "aten.mm",
                flops=2 * m * n * k,
                bytes_accessed=_read_bytes(io_bytes + weight_bytes, io_bytes + _LAYERS * weight_bytes, card),
                dtype="bfloat16",
                shapes=call_text("aten.mm", (rows, weights), (results,)),
            )
            yield MeasuredRow(f"{table}-{m}x{k}x{n}", float(line["us"]) / 1e3, card, op, CUDA_GRAPHS, card)


class AttentionTable(OpTable):
    """Fused attention: a prompt that attends to itself, or one token to a cache."""

    name = "attention"
    about = "fused attention of aiconfigurator's tables, in vLLM's kernels"

    def rows(self) -> list[MeasuredRow]:
        """Returns prefill and decode of all cards."""
        phases = ("prefill", "tokens"), ("decode", "cached")
        return [
            row
            for table, card in CARDS.items()
            for phase, count in phases
            for row in self._of_file(DATA / f"attention-{phase}-{table}.csv", phase, count, card)
        ]

    def _of_file(self, path: Path, phase: str, count: str, card: str) -> Iterator[MeasuredRow]:
        names = "batch", count, "heads", "kv_heads", "kv_bytes"
        for line in read_table(path, (*names, "us")):
            batch, tokens, heads, kv_heads, kv_bytes = (int(line[name]) for name in names)
            queries, keys = (1, tokens + 1) if phase == "decode" else (tokens, tokens)
            held = ELEMENT_BYTES if phase == "prefill" else kv_bytes  # a prompt's keys are written to the cache later
            num_queries = batch * heads * queries
            num_bytes = num_queries * (2 * HEAD_WIDTH * ELEMENT_BYTES + SUM_BYTES)
            num_bytes += 2 * batch * kv_heads * keys * HEAD_WIDTH * held
            query = Array("bfloat16", (batch, heads, queries, HEAD_WIDTH))
            cache = Array("bfloat16" if held == ELEMENT_BYTES else "float8_e4m3fn", (batch, kv_heads, keys, HEAD_WIDTH))
            kind = "aten._scaled_dot_product_flash_attention"
            op = Op(
                phase,
                kind,
                flops=num_queries * keys * (4 * HEAD_WIDTH + _SOFTMAX_FLOPS),
                bytes_accessed=_read_bytes(num_bytes, num_bytes, card),
                dtype="bfloat16",
                shapes=call_text(kind, (query, cache, cache, "~", 1), (query,)),
            )
            key = "-".join((path.stem.removeprefix("attention-"), *(line[name] for name in names)))
            yield MeasuredRow(key, float(line["us"]) / 1e3, card, op, CUDA_GRAPHS, f"{card} {phase}")
