"""Training of a policy on many problems."""
