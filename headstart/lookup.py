"""Look-up proposals: tokens copied from a text at hand, which the model then verifies in one pass.

This is prompt look-up decoding (Saxena, github.com/apoorvumang/prompt-lookup-decoding), which LLMA (arXiv 2304.04487)
does with retrieved texts. What is kept is the run of proposals that greedy decoding would have chosen, so the answer is
the greedy answer and only the number of passes falls.
"""

import itertools
from collections.abc import Sequence

from headstart.autoregressive import common_prefix

LONGEST = 3  # tokens of the answer that a match may rest on
BOUND = 10  # tokens proposed for one pass

Tokens = Sequence[int]


def propose(answer: Tokens, sources: Sequence[Tokens], longest: int, bound: int) -> tuple[int, ...]:
    """What followed the answer's last tokens in a source: at most `bound` tokens, none where nothing matches.

    The answer's last `longest` tokens are looked for in each source in turn, then its last `longest` - 1, down to the
    last one alone. The first place that matches, and that something follows, is taken.
    """
    for length in range(min(longest, len(answer)), 0, -1):
        tail = tuple(answer[-length:])
        for source in sources:
            for begin in range(len(source) - length):
                if source[begin] == tail[0] and tuple(source[begin : begin + length]) == tail:
                    return tuple(source[begin + length : begin + length + bound])
    return ()


def offered(answer: Tokens, sources: Sequence[Tokens], limit: int) -> tuple[int, ...]:
    """What is proposed after an unfinished answer: no more than leaves room for the pass' own token below `limit`."""
    return propose(answer, sources, LONGEST, min(BOUND, limit - len(answer) - 1))


def pieces(sources: Sequence[Tokens], stop_ids: frozenset[int]) -> list[Tokens]:
    """The sources cut at their end tokens, these left out: so nothing is proposed past an end token."""
    return [
        tuple(tokens)
        for source in sources
        for ends, tokens in itertools.groupby(source, stop_ids.__contains__)
        if not ends
    ]


def lookup_passes(answer: Tokens, kept: int, sources: Sequence[Tokens], limit: int) -> int:
    """The passes that a finished answer takes with look-ups in `sources` (cut into `pieces`), from its tokens alone.

    The first is the pass that kept `kept` tokens of a draft (0 without one) and gave the token after them.
    """
    passes, done = 1, kept + 1
    while done < len(answer):
        proposals = offered(answer[:done], sources, limit)
        done += common_prefix(proposals, answer[done:]) + 1
        passes += 1
    return passes
