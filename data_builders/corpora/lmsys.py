"""LMSYS-Chat-1M: a million conversations with 25 models (Zheng et al. 2023, arXiv 2309.11998). Gated.

A row is {conversation_id, model, conversation: [{content, role}], turn, language, openai_moderation, redacted}. A
conversation is flagged where any of its messages is. `language` was detected on the first user message only.
"""

from collections.abc import Mapping
from typing import Any

from data_builders.corpora.protocol import Conversation, Origin, Unusable, text

NAME = "lmsys"
ORIGIN = Origin(
    hub="lmsys/lmsys-chat-1m",
    files=("data/*.parquet",),
    licence="other",
    terms="LMSYS-Chat-1M Dataset License Agreement: use is granted to those who accept it, rows may not be passed on",
)
COLUMNS = (
    "conversation_id",
    "conversation",
    "language",
    "openai_moderation.list.element.flagged",
    "redacted",
)


def conversation(row: Mapping[str, Any]) -> Conversation:
    """The row with its marks; a row without moderation or redaction mark is taken for unmarked."""
    found = row.get("conversation")
    if not isinstance(found, list):
        raise Unusable("malformed row", "conversation: a list of messages is due")
    try:
        turns = tuple([(message["role"], message["content"]) for message in found])
        flagged = any(entry["flagged"] for entry in row.get("openai_moderation") or ())
    except (TypeError, KeyError) as error:
        raise Unusable("malformed row", f"a message or its moderation is not as the schema says ({error})") from None
    return Conversation(
        id=f"lmsys/{text(row, 'conversation_id')}",
        turns=turns,
        language=row.get("language"),
        flagged=flagged,
        redacted=row.get("redacted") is True,
    )
