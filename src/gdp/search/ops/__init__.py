"""The search for a device for each op: `auto`, and the searches that it runs."""
