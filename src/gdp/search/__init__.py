"""The search for a plan. START HERE: `place.py`."""
