"""Local programs: the module of one of T alike ranks, with weights cut and collectives in its forward and backward."""
