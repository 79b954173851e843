"""The one scorer: the time and the memory of a placement under docs/machine-model.md."""
