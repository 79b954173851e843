"""Clusters of devices and the routes between them: built-in, from a file, or this machine."""

from gdp.cluster.cluster import Cluster
from gdp.cluster.device import MAX_DEVICES, WORD_DEVICES, Device, Route

__all__ = ["MAX_DEVICES", "WORD_DEVICES", "Cluster", "Device", "Route"]
