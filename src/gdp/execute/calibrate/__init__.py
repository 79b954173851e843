"""Measuring this machine: its devices and the routes between them."""
