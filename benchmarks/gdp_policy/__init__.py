"""The policy of GDP (Zhou et al., arXiv 1910.01578), as published."""
