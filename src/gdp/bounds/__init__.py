"""Lower bounds on the step time: of any placement, and of a given one."""
