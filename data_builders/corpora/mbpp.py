"""MBPP's training part: the rows with ids 601 to 974, whatever a split's label says (arXiv 2108.07732).

A row is shown as the benchmark shows its own (`eval.benchmarks.mbpp`): the task, then each assertion as a piece. Both
spellings load, `text` (config "full") and `prompt` (config "sanitized").
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from data_builders.corpora.protocol import Conversation, Origin, Unusable
from eval.benchmarks import mbpp
from recipes.errors import UserError

NAME = "mbpp"
IDS = range(601, 975)
ORIGIN = Origin(hub=mbpp.HUB_ID, files=("full/*.parquet",), licence="cc-by-4.0", terms="CC-BY-4.0")
COLUMNS = ()


def conversation(row: Mapping[str, Any]) -> Conversation:
    """The row's task and tests, answered by its own solution."""
    try:
        request = mbpp.request(row)
    except ValidationError as error:
        first = error.errors()[0]
        raise Unusable("malformed row", f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (UserError, ValueError, RecursionError, MemoryError) as error:  # of the parser, too
        raise Unusable("malformed row", str(error) or type(error).__name__) from None
    if int(request.id.rpartition("/")[2]) not in IDS:
        raise Unusable("not of the training part", request.id)
    turns = (("user", request.text), ("assistant", request.reference or ""))
    return Conversation(request.id, turns, sentences=request.sentences)
