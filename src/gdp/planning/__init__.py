"""Questions around a plan: rivals, other machines, sweeps, plans found before."""
