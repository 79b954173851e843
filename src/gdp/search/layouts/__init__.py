"""The choice of a layout with the placement: which layouts there are, what they may take, and a search of the best."""
