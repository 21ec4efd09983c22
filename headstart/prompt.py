"""The only renderer: training, drafting, verification, evaluation and serving get their token ids here.

A prompt is the model's own chat template, rendered with placeholders and then filled, so that it is known which
characters are content. Control strings inside content are broken before they are tokenised (they are text that
somebody wrote, not control tokens); where content holds none, the ids are those of `apply_chat_template`. An answer is
never passed through the template (templates trim): its ids follow the prompt's, then the end of turn.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from rich.text import Text

from headstart.family import Family, token_id
from headstart.request import Message
from recipes.errors import UserError
from recipes.run_folder import digest

VERSION = "2"
IGNORED = -100  # the label of a token that is not supervised
_OPEN, _CLOSE = "\ue000", "\ue001"  # private-use characters around a placeholder's number
_PROBE = "Write `area(w, h)`.\n\nIt returns w*h, e.g. 6 for (2, 3)."


@dataclass(frozen=True)
class Row:
    """A training row: `ids` and `labels` of equal length; labels are IGNORED on the prompt."""

    ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Renderer:
    """Made by `renderer`, which proves it. `trims` names the roles whose content the template strips."""

    tokenizer: Any
    family: Family
    control: re.Pattern[str]
    control_ids: Mapping[str, int]
    end_of_turn: int
    trims: frozenset[str] = frozenset()
    fingerprint: str = ""
    default_system: bool = False

    def prompt(self, text: str, history: Sequence[Message] = (), system: str | None = None) -> list[int]:
        """Ids from which the model answers the user turn `text` after `history`, system message in front."""
        messages = conversation(text, history, system)
        return self._encode(self._structure(messages), [self._content(message) for message in messages])

    def answer(self, text: str) -> list[int]:
        """Ids of an answer's text, without the end of turn."""
        return self._encode(["", ""], [text])

    def row(self, text: str, answer: str, history: Sequence[Message] = (), system: str | None = None) -> Row:
        """A training row: loss on the answer and its end of turn only. Raises UserError for an empty answer."""
        if not answer.strip():
            raise UserError("a training row needs an answer: this one is empty")
        prompt = self.prompt(text, history, system)
        target = [*self.answer(answer), self.end_of_turn]
        return Row([*prompt, *target], [IGNORED] * len(prompt) + target)

    def pair(self, pair: Mapping[str, Any]) -> Row:
        """The training row of a pair in TRL's conversational prompt-completion format. Raises UserError as `row`."""
        messages = pair["prompt"]
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        turns = messages[1:] if system is not None else messages
        history = [Message(turn["role"], turn["content"]) for turn in turns[:-1]]
        return self.row(turns[-1]["content"], pair["completion"][0]["content"], history, system)

    def text(self, ids: Sequence[int]) -> str:
        """The text of answer ids (without the stop token)."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def preview(self, row: Row) -> Text:
        """The row as the model sees it: supervised tokens green, the rest dim."""
        drawn = Text()
        for token, label in zip(row.ids, row.labels, strict=True):
            drawn.append(self.text([token]), style="dim" if label == IGNORED else "bold green")
        return drawn

    def template_text(self, messages: Sequence[dict[str, str]], generation: bool = True) -> str:
        """What the model's own template makes of `messages`."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=generation, **self.family.template_arguments
                )
            )
        except (jinja2.TemplateError, ValueError, TypeError, ArithmeticError) as error:
            raise UserError(f"chat template of family {self.family.name} refuses the conversation: {error}") from error

    def _content(self, message: dict[str, str]) -> str:
        content = message["content"]
        return content.strip() if message["role"] in self.trims else content

    def _structure(self, messages: Sequence[dict[str, str]]) -> list[str]:
        """The template's own text around the contents: one piece more than there are messages."""
        marked = [{**message, "content": f"{_OPEN}{i}{_CLOSE}"} for i, message in enumerate(messages)]
        pieces = re.split(f"{_OPEN}(\\d+){_CLOSE}", self.template_text(marked))
        if pieces[1::2] != [str(i) for i in range(len(messages))]:
            raise UserError(f"chat template of family {self.family.name} drops, repeats or reorders messages")
        contents = [self._content(message) for message in messages]
        filled = "".join(p + c for p, c in zip(pieces[::2], [*contents, ""], strict=True))
        if not any(self.control.search(content) for content in contents) and filled != self.template_text(messages):
            raise UserError(f"chat template of family {self.family.name} rewrites this content: {contents[-1][:60]!r}")
        return pieces[::2]

    def _encode(self, structure: Sequence[str], contents: Sequence[str]) -> list[int]:
        """Tokenise structure and contents as one text, broken only at control tokens and inside control strings."""
        ids: list[int] = []
        pending = ""
        for i, piece in enumerate(structure):
            for k, part in enumerate(self.control.split(piece)):
                if k % 2:
                    ids += [*self._plain(pending), self.control_ids[part]]
                    pending = ""
                else:
                    pending += part
            if i < len(contents):
                *broken, rest = self._broken(contents[i])
                for part in broken:
                    ids += self._plain(pending + part)
                    pending = ""
                pending += rest
        return [*ids, *self._plain(pending)]

    def _broken(self, content: str) -> list[str]:
        """Content cut after the first character of each control string, so that none is recognised."""
        cuts = [0, *(match.start() + 1 for match in self.control.finditer(content)), len(content)]
        return [content[a:b] for a, b in itertools.pairwise(cuts)]

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []


def renderer(tokenizer: Any, family: Family) -> Renderer:
    """Build the renderer of a tokenizer and prove it. Raises UserError that names the family where a proof fails."""
    if not tokenizer.chat_template:
        raise UserError(f"{tokenizer.name_or_path}: has no chat template; headstart adapts chat models only")
    added = tokenizer.added_tokens_decoder.values()
    special = {str(token) for token in added if token.special}
    strings = sorted({*special, *family.control, *family.stop_tokens}, key=len, reverse=True)
    control = re.compile("(" + "|".join(map(re.escape, strings)) + ")")
    known = tokenizer.get_added_vocab()
    ids = {string: known[string] for string in strings if string in known}
    token_id(tokenizer, family.end_of_turn)
    bare = Renderer(tokenizer, family, control, ids, ids[family.end_of_turn])
    whole = replace(bare, trims=_trims(bare))
    prove(whole)
    return replace(whole, fingerprint=_fingerprint(whole), default_system=_default_system(whole))


def prove(r: Renderer) -> list[str]:
    """The renderer's promises, on probes. Raises UserError with the family and the promise that does not hold."""
    history = (Message("user", "Hi."), Message("assistant", "Hello!"))
    held: list[str] = []
    for case in (
        (_PROBE, (), None),
        (_PROBE, (), "Be brief."),
        (_PROBE, history, "Be brief."),
        (" x\n", history, None),
    ):
        messages = conversation(*case)
        ids, text = r.prompt(*case), r.template_text(messages)
        same = ids == r.tokenizer.encode(text, add_special_tokens=False)
        held.append(_hold(r, same, "prompt ids are the template's"))
        bos = 1 if r.family.bos else 0
        once = bos == 0 or ids.count(token_id(r.tokenizer, str(r.family.bos))) == bos
        held.append(_hold(r, once, "there is exactly one BOS"))
        answered = [*messages, {"role": "assistant", "content": _PROBE}]
        closed = r.tokenizer.encode(r.template_text(answered, generation=False), add_special_tokens=False)
        row = r.row(case[0], _PROBE, *case[1:])
        begins = closed[: len(row.ids)] == row.ids
        held.append(_hold(r, begins, "prompt, answer and end of turn begin the whole conversation"))
        ends = [x for x in row.labels if x != IGNORED].count(r.end_of_turn)
        held.append(_hold(r, ends == 1, "the end of turn is supervised once"))
    hostile = f"a {r.family.end_of_turn} b {r.family.bos or ''} c {''.join(r.family.control)} d"
    clean, dirty = r.prompt("a b c"), r.prompt(hostile)
    controls = set(r.tokenizer.convert_tokens_to_ids(r.control.findall(hostile)))
    for control in controls:
        held.append(_hold(r, clean.count(control) == dirty.count(control), "control strings in content are text"))
    held.append(_hold(r, hostile in r.text(dirty), "content survives byte for byte"))
    draft = "    return a + b\n"
    held.append(_hold(r, r.text(r.answer(draft)) == draft, "an answer survives byte for byte"))
    own_turn = r.family.end_of_turn in r._structure(conversation("x", (), "Be brief."))[1]
    in_turn = own_turn == (r.family.system_role == "turn")
    held.append(_hold(r, in_turn, f"a system message goes into the {r.family.system_role}"))
    return list(dict.fromkeys(held))


def conversation(text: str, history: Sequence[Message], system: str | None) -> list[dict[str, str]]:
    """The chat messages of a prompt, as a server takes them: role and content, the system message in front."""
    turns = [{"role": message.role, "content": message.content} for message in history]
    if system is not None and turns and turns[0]["role"] == "system":  # templates take one system message
        turns[0]["content"] = f"{system}\n\n{turns[0]['content']}"
    elif system is not None:
        turns.insert(0, {"role": "system", "content": system})
    return [*turns, {"role": "user", "content": text}]


def baked_template(r: Renderer) -> str:
    """The chat template with the family's arguments set inside, for a merged model that is served without them."""
    sets = "".join(f"{{%- set {name} = {value!r} %}}" for name, value in r.family.template_arguments.items())
    return sets.replace("True", "true").replace("False", "false") + r.tokenizer.chat_template


def _trims(r: Renderer) -> frozenset[str]:
    """Roles whose content the template strips, found by a probe with blanks on both sides."""
    history = (Message("user", "u"), Message("assistant", "  probe assistant \n"))
    text = r.template_text(conversation("  probe user \n", history, "  probe system \n"))
    return frozenset(role for role in ("system", "user", "assistant") if f"  probe {role} \n" not in text)


def _default_system(r: Renderer) -> bool:
    """Whether the template opens a system turn of its own where no system message is given."""
    opening = r._structure(conversation("x", (), "y"))[0]
    return r.family.system_role == "turn" and r.template_text(conversation("x", (), None)).startswith(opening)


def _fingerprint(r: Renderer) -> str:
    """A hash of what the renderer does, not of its files: equal for a base and its merged model."""
    history = (Message("user", "Hi."), Message("assistant", "Hello!"))
    probes = [r.prompt(_PROBE), r.prompt(_PROBE, history, "Be brief."), r.prompt(f"x {r.family.end_of_turn} y")]
    vocabulary = sorted(r.tokenizer.get_vocab().items())
    return digest([VERSION, r.family.name, probes, r.answer(_PROBE), r.end_of_turn, digest(vocabulary)])


def _hold(r: Renderer, holds: bool, promise: str) -> str:
    if not holds:
        raise UserError(
            f"family {r.family.name}, {r.tokenizer.name_or_path}: the chat template breaks a promise: {promise}"
        )
    return promise
