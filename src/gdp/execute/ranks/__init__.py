"""A plan with a process for each device."""
