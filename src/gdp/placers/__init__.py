"""Placers: from a problem to a placement. `CLASSICAL` are those without search or training, in a fixed order."""

from collections.abc import Mapping
from types import MappingProxyType

from gdp.placers.base import NoTimeError, Placer, single
from gdp.placers.contiguous import contiguous
from gdp.placers.dp_stages import dp_stages
from gdp.placers.expert import expert
from gdp.placers.list_scheduling import heft, m_etf, m_sct, m_topo
from gdp.placers.memory_repair import fit_memory
from gdp.placers.metis import metis

__all__ = ["CLASSICAL", "NoTimeError", "Placer", "fit_memory"]

CLASSICAL: Mapping[str, Placer] = MappingProxyType(
    {
        "single": single,
        "expert": expert,
        "contiguous": contiguous,
        "dp-stages": dp_stages,
        "metis": metis,
        "m-topo": m_topo,
        "m-etf": m_etf,
        "m-sct": m_sct,
        "heft": heft,
    }
)
