"""MT-Bench: 80 questions of two turns (Zheng et al. 2023, arXiv 2306.05685), scored by F1 where there is a reference.

The second turn is streamed, with the first turn and its reference answer as history. A question without a reference
for its first turn has no honest history: there the first turn is streamed, alone. A streamed turn without a reference
counts for speed and not for quality.

References come from two places. GPT-4's answers (FastChat's `reference_answer/gpt-4.jsonl`: reasoning, math, coding)
come first: they are whole answers, fit to stand in a history, and FastChat's judge compares with them; some of them are
wrong. Where they have nothing, the question's own `reference` serves: right, but often a bare result or a hint for the
judge, and one of its two strings may be empty, which counts as none. The hub's rows hold the latter only, so their
scores do not compare with those of FastChat's folder.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import AliasChoices, Field

from eval.benchmarks import rows
from eval.benchmarks.f1 import known, score, unfit
from eval.benchmarks.protocol import Metric
from eval.benchmarks.rows import Hub, Row
from headstart.request import Message, Request
from headstart.sentences import split
from recipes.errors import UserError

__all__ = ["METRIC", "NAME", "known", "load", "score", "unfit"]

NAME = "mtbench"
METRIC: Metric = "F1"
HUB = Hub("HuggingFaceH4/mt_bench_prompts", "train")  # lmsys' own data set there holds judgments, not the questions
QUESTIONS = "question.jsonl"
ANSWERS = "reference_answer/gpt-4.jsonl"


class Question(Row):
    """A row, in FastChat's spelling or in the hub's; `reference` is absent, null or empty where there is none."""

    id: int | str = Field(validation_alias=AliasChoices("question_id", "prompt_id"))
    turns: list[str] = Field(validation_alias=AliasChoices("turns", "prompt"), min_length=2, max_length=2)
    reference: list[str] | None = None


class Choice(Row):
    """One answer to both turns."""

    turns: list[str]


class Answer(Row):
    """A row of a reference answer file."""

    question_id: int | str
    choices: list[Choice] = Field(min_length=1)


def load(path: str | None) -> list[Request]:
    """One request a question, in their order.

    `path` is FastChat's folder (question.jsonl and, where it is there, reference_answer/gpt-4.jsonl), or what
    `rows.read` takes: then the questions' own references are all there is. Raises UserError as `rows.read` does, and
    for a question that is there twice.
    """
    folder = Path(path) if path and (Path(path) / QUESTIONS).is_file() else None
    answers = _answers(folder / ANSWERS) if folder else {}
    requests: dict[str, Request] = {}
    for question in rows.read(Question, HUB, str(folder / QUESTIONS) if folder else path):
        request = _request(question, answers)
        if request.id in requests:
            raise UserError(f"{path or HUB.id}: question {question.id} stands there twice; take one out")
        requests[request.id] = request
    return list(requests.values())


def _answers(file: Path) -> Mapping[str, Sequence[str]]:
    """The turns of each question's first answer."""
    found = rows.read_local(Answer, str(file)) if file.is_file() else ()
    return {str(answer.question_id): answer.choices[0].turns for answer in found}


def _request(question: Question, answers: Mapping[str, Sequence[str]]) -> Request:
    sources = [answers.get(str(question.id), ()), question.reference or ()]
    first, second = (next(_given(sources, turn), None) for turn in (0, 1))
    asked, then = question.turns
    name = f"{NAME}/{question.id}"
    if first is None:
        return Request(name, NAME, tuple(split(asked)))
    return Request(name, NAME, tuple(split(then)), (Message("user", asked), Message("assistant", first)), second)


def _given(sources: Sequence[Sequence[str]], turn: int) -> Iterator[str]:
    return (source[turn] for source in sources if turn < len(source) and source[turn].strip())
