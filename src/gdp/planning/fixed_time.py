"""The time of a command that is not the search's: reading before it, writing after it."""

# that an op takes at the end of a command, to replay and keep the plan, and in each large file
_REPLAY_US, _FILE_US = 3.0, 5.0


def search_s(total_s: float, spent_s: float, num_ops: int, num_files: int = 0) -> float:
    """Returns the seconds for a search and advice in a budget of `total_s`, after `spent_s`.

    Plan and `num_files` large files are written after it. At least half of the budget is for the search.
    """
    return max(total_s - spent_s - written_s(num_ops, num_files), total_s / 2)


def written_s(num_ops: int, num_files: int = 0) -> float:
    """Returns about how long it takes to write the plan of a step of `num_ops`, and `num_files` large files."""
    return 1e-6 * num_ops * (_REPLAY_US + _FILE_US * num_files)
