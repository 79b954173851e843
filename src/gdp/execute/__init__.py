"""Run a plan: every op of a captured step on its device, in the plan's order, and measure it."""
