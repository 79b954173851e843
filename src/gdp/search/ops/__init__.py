"""Where each op of a step goes: `auto`, and what it runs."""
