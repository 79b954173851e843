"""Units: ops that move as one, in the groupings that placers, searches and policies use."""
