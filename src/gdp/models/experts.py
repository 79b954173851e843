"""Expected reads of expert weights: a mixture of experts reads the weights of the experts that its tokens are sent to.

Routing depends on content, which a capture does not have. It is taken as uniform and independent between tokens: each
token is sent to `per_token` distinct experts of `num_experts`, any set as likely as any other. An expert is missed by
one token with probability `1 - per_token / num_experts`, so the expected share of experts that `num_tokens` tokens hit
is `1 - (1 - per_token / num_experts) ** num_tokens`. Trained routers are less even: fewer experts are hit, so this is
the upper end for a given number of tokens, and exact for one token and for very many."""

from fractions import Fraction

_GRID = 2**32  # shares are rounded to this, so that the last bit of a machine's `pow` does not reach a graph


def share_hit(num_experts: int, num_rows: int, per_token: int | None = None) -> Fraction:
    """Returns the expected share of the experts, in [0, 1], that a grouped product of `num_rows` rows reads. A token
    makes `per_token` rows. None: not known, each row is sent to an expert of its own accord, which may be one that
    another row of its token is sent to."""
    if per_token is None or not 0 < per_token <= num_experts or num_rows % per_token:
        per_token = 1
    num_tokens = num_rows // per_token
    if num_tokens <= 1:
        return Fraction(num_tokens * per_token, num_experts)
    return Fraction(round((1 - (1 - per_token / num_experts) ** num_tokens) * _GRID), _GRID)
