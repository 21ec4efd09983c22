"""Which conversations become requests: what is kept, repaired or dropped, each by a written rule and with a reason.

Repaired: line ends become line feeds; control characters and lone surrogates are taken out; roles are spelt "user",
"assistant" and "system"; turns of one role in a row are joined; a blank turn is taken out, of the user with what was
answered to it; so is an answer that no user turn precedes; a last turn without an answer is cut off, unless it is the
only one and the model is to answer itself; of an over-long history the system message goes where it does not fit, and
the oldest exchanges go first.

Dropped, the first rule that holds: flagged, redacted, language (as the recipe says), odd role (tools; a system message
behind the first turn), no answered turn, prompt marker in the answer (a model that went on to write the user's next
turn), too long, one sentence (nothing can be held back).
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data_builders.corpora.protocol import Conversation, Unusable
from headstart.request import Message, Request
from headstart.sentences import split
from recipes.schema import Data

ROLES = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
}
CONTROL = "control characters taken out"
SURROGATES = "lone surrogates taken out"
LINE_ENDS = "line ends made line feeds"
JOINED = "turns of one role joined"
BLANK = "blank turns taken out"
LEADING = "answer before the first request taken out"
TRAILING = "unanswered last turn cut off"
SHORTENED = "oldest history taken out"

_SEEN = re.compile(r"[^\s\xad\u200b-\u200f\u2060-\u2064]")  # a lone zero-width space is no answer
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAMES = "(?:Human|Instruction|Assistant|User)"
_MARKER = re.compile(rf"^[ \t]*(?:#{{2,3}}[ \t]?{_NAMES}[ \t]*:|###{_NAMES}\b|<\|im_(?:start|end)\|>|\[/?INST\])", re.M)


@dataclass(frozen=True)
class Rules:
    """The part of a recipe that decides here. `answers_of` says of a corpus whether the model itself will answer."""

    languages: frozenset[str]
    flagged: str
    redacted: str
    max_characters: int
    answers_of: Callable[[str], str]


def rules(data: Data) -> Rules:
    """The rules of a recipe."""
    return Rules(frozenset(data.languages), data.flagged, data.redacted, data.max_characters, data.answers_of)


def admit(found: Conversation, source: str, rules: Rules) -> tuple[Request, list[str]]:
    """The request of a conversation, its answer as `reference`, and what was repaired. Raises Unusable."""
    if found.flagged and rules.flagged == "drop":
        raise Unusable("flagged by moderation")
    if found.redacted and rules.redacted == "drop":
        raise Unusable("redacted")
    if rules.languages and found.language is not None and str(found.language) not in rules.languages:
        raise Unusable("other language", str(found.language))
    if _SURROGATE.search(found.id + json.dumps(dict(found.extra), ensure_ascii=False)):
        raise Unusable("malformed row", "id: a lone surrogate")
    repairs: list[str] = []
    own_answer = rules.answers_of(source) == "self"
    *history, turn = _alternating(_cleaned(found.turns, repairs), own_answer, repairs)
    answer = None
    if turn.role == "assistant":
        answer, turn = turn.content, history.pop()
    if not own_answer and _MARKER.search(answer or ""):
        raise Unusable("prompt marker in the answer")
    kept = _shortened(history, len(turn.content) + len(answer or ""), rules.max_characters, repairs)
    same = found.sentences is not None and "".join(found.sentences) == turn.content
    sentences = tuple(found.sentences or ()) if same else tuple(split(turn.content))
    if len(sentences) < 2:
        raise Unusable("one sentence")
    return Request(found.id, source, sentences, tuple(kept), answer, found.extra), repairs


def _cleaned(turns: Sequence[tuple[str, str]], repairs: list[str]) -> list[Message]:
    """The turns that have words, in known roles and clean text."""
    messages: list[Message] = []
    asked = ""
    for role, content in turns:
        known = ROLES.get(role.strip().lower()) if isinstance(role, str) else None
        if known is None or (known == "system" and messages):
            raise Unusable("odd role", str(role)[:40])
        if not isinstance(content, str):
            raise Unusable("malformed row", f"content: a string is due, here is {type(content).__name__}")
        if _ODD.search(content):
            content = _clean(content, repairs)
        asked = known if known != "assistant" else asked
        if not _SEEN.search(content):
            repairs.append(BLANK)
            asked = "nothing" if known == "user" else asked
        elif asked != "nothing":
            messages.append(Message(known, content))
    return messages


def _clean(text: str, repairs: list[str]) -> str:
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        repairs.append(LINE_ENDS)
    for pattern, name in ((_CONTROL, CONTROL), (_SURROGATE, SURROGATES)):
        text, count = pattern.subn("", text)
        if count:
            repairs.append(name)
    return text


def _alternating(messages: list[Message], own_answers: bool, repairs: list[str]) -> list[Message]:
    """An optional system message, then user and assistant in turn, an answer last; with `own_answers` it may be a lone
    user turn. Raises Unusable where none is left.

    A blank answer was taken out before: two user turns that it parted are asked as one, as in a chat.
    """
    system = messages[:1] if messages and messages[0].role == "system" else []
    turns: list[Message] = []
    for message in messages[len(system) :]:
        if turns and turns[-1].role == message.role:
            turns[-1] = Message(message.role, f"{turns[-1].content}\n\n{message.content}")
            repairs.append(JOINED)
        elif not turns and message.role == "assistant":
            repairs.append(LEADING)
        else:
            turns.append(message)
    if turns and turns[-1].role == "user" and not (own_answers and len(turns) == 1):
        turns.pop()
        repairs.append(TRAILING)
    if not turns:
        raise Unusable("no answered turn")
    return [*system, *turns]


def _shortened(history: list[Message], taken: int, most: int, repairs: list[str]) -> list[Message]:
    """The history's latest exchanges (and its system message) that fit beside `taken` characters."""
    if taken > most:
        raise Unusable("too long", f"{taken} characters")
    system = history[:1] if history and history[0].role == "system" else []
    turns = history[len(system) :]
    left = most - taken
    fits = not system or len(system[0].content) <= left
    if system and fits:
        left -= len(system[0].content)
    begin = len(turns)
    while begin >= 2 and (size := sum(len(message.content) for message in turns[begin - 2 : begin])) <= left:
        left -= size
        begin -= 2
    if begin or not fits:
        repairs.append(SHORTENED)
    return [*(system if fits else []), *turns[begin:]]
