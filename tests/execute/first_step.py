"""Captures and simulates a step in the server that ranks are forked from: they share all that the first one loads."""

from execute.placed_steps import randomly_placed
from tiny_models import captured

randomly_placed(captured("rnnlm"), 2, 0)
