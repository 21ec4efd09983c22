"""Token F1 of an answer against a reference, as SQuAD v1.1 scores it (Rajpurkar et al. 2016, arXiv 1606.05250).

Both texts become bags of words: lower case, ASCII punctuation taken out (not replaced: "well-known" is "wellknown"),
the articles a, an and the taken out, cut at white space. With `shared` the words that both bags hold, each as often as
the rarer side has it, P = shared / words of the answer and R = shared / words of the reference,

    F1 = 2PR / (P + R) = 2 * shared / (words of the answer + words of the reference),

and 0 where nothing is shared. One reference a request, so no maximum over several is taken. It is made for English:
a script without blanks between its words counts as one word a passage.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

from eval.benchmarks.protocol import Known, Score
from eval.sandbox import Limits
from headstart.request import Request

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def words(text: str) -> list[str]:
    """What of `text` counts, in order; [] where it holds nothing but articles and punctuation."""
    return _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(answer: str, reference: str) -> float:
    """The module's formula, in [0, 1]. As in v1.1, two texts without a word share nothing and get 0."""
    given, wanted = Counter(words(answer)), Counter(words(reference))
    shared = (given & wanted).total()
    return 2 * shared / (given.total() + wanted.total()) if shared else 0.0


def score(requests: Sequence[Request], answers: Sequence[str], limits: Limits) -> list[Score]:
    """One score a request, in order. `limits` bind nothing: no code runs.

    None where there is no reference, or one without a word, which no answer could match.
    """
    return [_score(request, answer) for request, answer in zip(requests, answers, strict=True)]


def _score(request: Request, answer: str) -> Score:
    if request.reference is None:
        return Score(None, "no reference")
    if not words(request.reference):
        return Score(None, "reference without words")
    return Score(f1(answer, request.reference), "scored")


def known(request: Request) -> list[Known]:
    """The reference, which gets 1 against itself; none where the request cannot be scored."""
    return [Known(request.reference)] if request.reference and words(request.reference) else []


def unfit(request: Request) -> None:
    """Every request can be scored on every machine."""
