"""The time of a command that is not the search's: reading before it, writing after it."""

# that an op takes at the end of a command: to replay and keep the plan, to write its graph, and to write its report
_REPLAY_US, _GRAPH_US, _REPORT_US = 3.0, 1.0, 8.0
_LATE_SHARE, _LATE_S = 0.1, 0.5  # that a command may take longer than its budget


def search_s(total_s: float, spent_s: float, last_s: float) -> float:
    """Returns the seconds for a search and advice in a budget of `total_s`, after `spent_s` and before `last_s`.

    At least half of the budget is for the search.
    """
    return max(total_s - spent_s - last_s, total_s / 2)


def written_s(num_ops: int, *, has_graph: bool = False, has_report: bool = False) -> float:
    """Returns about how long it takes to write the plan of a step of `num_ops`, with its graph and its report."""
    return 1e-6 * num_ops * (_REPLAY_US + _GRAPH_US * has_graph + _REPORT_US * has_report)


def report_s(num_ops: int) -> float:
    """Returns about how long it takes to write the report of a step of `num_ops`."""
    return 1e-6 * num_ops * _REPORT_US


def latest_s(total_s: float) -> float:
    """Returns the seconds after the begin of a budget of `total_s` by which all files are to be written."""
    return (1 + _LATE_SHARE) * total_s + _LATE_S
