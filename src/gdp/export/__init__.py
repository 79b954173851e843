"""Plans in the formats of the tools that users run already, and places for what these can express."""
