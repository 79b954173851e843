"""Plans in the formats of other tools, and searches for plans that these can express."""
