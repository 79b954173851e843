"""Reading ahead: the parts of the batch that layouts will likely need, captured before the time begins."""

from gdp.budget import Clock
from gdp.graph.interpolation import have_same_ops
from gdp.search.layouts.known_ways import (
    USUAL_ZERO,
    all_ways,
    fitting_way,
    is_large,
    is_too_large,
    least_memory,
    promising_depth,
    share_held,
    stages_of_groups,
)
from gdp.search.layouts.layout_search import LayoutSearch
from gdp.search.question import BatchQuestion

_TIGHT = 0.5  # of the memory of a group is held by a copy of the model: stages may be needed; untuned


def read_ahead_of_groups(question: BatchQuestion) -> None:
    """Reads the part of the batch that stages on groups of several hosts need, if these may be needed, and else that of
    pipelines, which take more micro-batches than there are groups; others are interpolated from it."""
    search, parts = LayoutSearch(question, Clock(None)), question.parts
    if share_held(search) > _TIGHT and (way := stages_of_groups(search)) is not None:
        part = search.attempt(lambda way: parts.exact(way.layout.num_parts), way)
        if part is not None and have_same_ops(parts.exact(1), part):
            return
    parts.read_ahead(2 * question.cluster.num_devices, question.settings.large)
    if is_too_large(question):
        _read_usual(search)


def read_ahead(question: BatchQuestion) -> None:
    """Reads the parts of the batch from which others are interpolated, and the one that what users run needs: replicas
    on single devices with the fewest micro-batches that fit by estimate, or else FSDP with all blocks recomputed. Of
    large steps, that takes long to estimate: it is read where no device has the memory for one copy."""
    question.parts.read_ahead(question.cluster.num_devices, question.settings.large)
    if not is_large(question) or is_too_large(question):
        _read_usual(LayoutSearch(question, Clock(None)))


def _read_usual(search: LayoutSearch) -> None:
    """Reads the part of the batch that replicas on single devices take with the fewest micro-batches that fit by
    estimate, or else that of FSDP with all blocks recomputed, and that of deep stages where these promise more."""
    usual = [way for way in all_ways(search) if way.num_places == 1 and way.layout.zero in USUAL_ZERO]
    num_replicas = max((way.layout.data for way in usual), default=0)
    widest = [way for way in usual if way.layout.data == num_replicas and not is_large(search.question)]
    fewest = min((way.layout.num_parts for way in widest), default=0)
    widest = [way for way in widest if way.layout.num_parts == fewest]
    fitting = [way for way in (fitting_way(search, way) for way in widest) if way is not None]
    least = None if fitting else least_memory(search)
    if counts := [way.layout.num_parts for way in (*fitting, least) if way is not None]:
        search.attempt(lambda _: search.parts.exact(min(counts)), usual[0])
    if not fitting and (deep := promising_depth(search, least)) is not None:
        search.attempt(lambda way: search.parts.exact(way.layout.num_parts), deep)
