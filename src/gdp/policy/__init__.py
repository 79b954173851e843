"""Learned placement policies: networks, roll-outs, training, checkpoints."""
