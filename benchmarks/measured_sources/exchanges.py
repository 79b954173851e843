"""Tables of exchanges: NCCL's sums and gathers inside one host, against what layouts make of them."""

from collections.abc import Iterator

import numpy as np

from benchmarks.measured_sources.op_tables import CARDS
from benchmarks.measured_sources.source import (
    DATA,
    CapturedGraphs,
    MeasuredRow,
    MeasuredSource,
    PredictedRow,
    cluster_of,
    read_table,
)
from gdp.cluster import Cluster
from gdp.costs.collectives import exchange_times
from gdp.graph import Graph
from gdp.graph.builder import GraphBuilder
from gdp.parallel.replicas import joined
from gdp.parallel.rings import Collective, Rings
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate


class ExchangeTable(MeasuredSource):
    """All-reduce, reduce-scatter and all-gather of one buffer; `bytes` are those of all of it."""

    name = "exchanges"
    about = "NCCL in one host, of aiconfigurator's tables and of vTrain's"
    sets_all = True

    def rows(self) -> list[MeasuredRow]:
        """Returns the exchanges of all files."""
        tables = [*CARDS.items(), ("a100-sxm-vtrain", "a100-sxm-40g")]
        return [row for table, card in tables for row in self._of_file(table, card)]

    def _of_file(self, table: str, card: str) -> Iterator[MeasuredRow]:
        for line in read_table(DATA / f"collectives-{table}.csv", ("exchange", "cards", "bytes", "us")):
            exchange, cards, num_bytes = line["exchange"], int(line["cards"]), int(line["bytes"])
            case, key = (exchange, cards, num_bytes), f"{table}-{exchange}-{cards}-{num_bytes}"
            group = f"{table} {exchange} {cards}"
            yield MeasuredRow(key, float(line["us"]) / 1e3, card, case, ranked_with=group)

    def predict(self, row: MeasuredRow, graphs: CapturedGraphs) -> PredictedRow:
        """Simulates what layouts make of the exchange, on cards that do nothing else."""
        exchange, cards, num_bytes = row.case
        cluster = cluster_of(f"{cards}x{row.card}{_LINKS.get(row.card, '')}")
        graph = exchange_graph(exchange, cards, num_bytes, cluster)
        problem = Problem.build(graph, cluster)
        simulation = simulate(problem, graph.replicas)
        size = "up to 1 MB" if num_bytes <= 2**20 else "up to 64 MB" if num_bytes <= 2**26 else "larger"
        return PredictedRow(row, simulation.step_time_ns / 1e6, f"{exchange}, {size}")


_LINKS = {"l40s-48g": ":pcie4-host"}  # of hosts that were measured, where they are others than the card's own


def exchange_graph(exchange: str, cards: int, num_bytes: int, cluster: Cluster) -> Graph:
    """Returns an exchange of replicas that have nothing else, as layouts build it on the cards of a cluster."""
    builder = GraphBuilder()
    collective = Collective(exchange, 0, num_bytes, "bfloat16", "backward")
    first, last = collective.add_ends(builder, 0, (0, 0))  # NCCL alone, from and to its own buffers
    builder.control(np.array([first]), np.array([last]))
    order, times = exchange_times(cluster, [[card] for card in range(cards)]) or (None, None)
    return joined([builder.build(exchange)] * cards, [collective], Rings.of(cards, order, times=times))
