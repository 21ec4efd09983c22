"""Does a row of a corpus hold a task of a benchmark? Four ways of looking, each with a name in the certificate.

verbatim  Most of the rare runs of five words of the task stand in the row, or of its statement alone (MBPP's sentence
          without the tests, HumanEval's docstring without the examples, CanItEdit's instruction without the program). A
          run is rare unless three tasks or more share it: so common phrases ("write a python function to") and imports
          do not count. A text of fewer than eight words, or a statement of fewer than six, is too common to tell.
examples  The task's examples, arguments and result, stand in the row in whatever notation: function names, brackets,
          quotes and the words between ("should return", "->", "==") are left out, what is left is compared token by
          token. Examples count by how much they say: counting up (1, 2, 3) says nothing new. Short ones, which any list
          of numbers might hold, count only beside a word that is the task's own.
code      A function of the task's solution stands in the row under whatever names: local names are numbered, docstring,
          annotations and layout left out; the whole body is the same, or most of its weightier statements are.
renamed   Most of the rare runs of five words that are left when the task's own names are taken out.

A row is looked at as a whole: every turn of it, and the answer. Long texts are cut at LONGEST characters.
"""

import ast
import builtins
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_builders.words import words
from eval.benchmarks import mbpp
from eval.extract import parsed, split_blocks
from headstart.request import Request

VERSION = "1"
LONGEST = 60_000
RUN = 5
COMMON = 3  # a run that so many tasks share is a common phrase
SHARE = 0.5  # of a task's rare runs
LEAST = 4  # runs
STATED = 0.7  # of a statement's rare runs
FREQUENT = 40  # tasks that a word of a task's own may stand in
SAYS_MUCH = 12  # what no row says by chance
LONG, VALUES = 5, 40  # tokens of an example that a row of so few values does not have by chance
SAYS, SAYS_ALONE = 6, 4  # what examples have to say together, see `_says`; what the only one of a task has to say
BODY = 45  # characters of the least function body, as `_dump` writes it, that is looked for as a whole
BODIES = 0.5  # share of a solution's functions, by that size
STATEMENTS = 0.6  # share, by that size, of a solution's weightier statements
STATEMENT, STATEMENTS_LEAST = 40, 200  # size of a weightier statement; and of those that have to be met together
WINDOW = 24  # tokens, beside twice those of a task's examples, within which they stand together

_FILTER_BITS = 22
_SHIFT = np.uint64(64 - _FILTER_BITS)
_ODD = np.uint64(0x9E3779B97F4A7C15)  # mixes the bits of what it multiplies
Tokens = NDArray[np.uint64]

_CALL_WORDS = frozenset(  # what people write between a call and its result
    re.findall(
        r"\w+",
        """assert should returns return returned returning gives give given gives yields yield yielding equals equal is
        are be the a an result output results outputs expected expect print input for in as to and with of when would
        will must evaluates produces produce we get gets you then value example check has have it its s that this on at
        by call calling candidate abs set list sorted tuple math isclose test rel tol answer""",
    )
)
_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True)
class Hit:
    """A task that a row holds, and how that was seen."""

    benchmark: str
    id: str
    method: str


@dataclass(frozen=True)
class Function:
    """A function without its names: hashes of its body and of its weightier statements, each with its size, which is
    the number of characters that `_dump` writes. `inner`: it stands inside another function."""

    body: str
    size: int
    statements: tuple[tuple[str, int], ...]
    inner: bool


@dataclass(frozen=True)
class Task:
    """What the index keeps of a benchmark's request."""

    benchmark: str
    id: str
    text: str
    statement: str
    examples: tuple[tuple[str, ...], ...]
    functions: tuple[Function, ...]
    names: tuple[str, ...]


def task(benchmark: str, request: Request) -> Task:
    """A request of a benchmark, as it is looked for."""
    text = request.text.partition(": ")[2] or request.text if benchmark == "coedit" else request.text
    code = _code(request.reference or "")
    tests = "\n".join(str(request.extra.get(key, "")) for key in ("tests", "test") if benchmark != "canitedit")
    shown = request.text if benchmark != "chat" else ""
    examples = tuple(dict.fromkeys([*_asserted(tests), *_doctests(shown)]))
    functions = tuple(_functions(code))
    return Task(
        benchmark,
        request.id,
        text,
        _statement(benchmark, request),
        examples,
        functions,
        tuple(sorted(set(_own_names(code)))),
    )


def _statement(benchmark: str, request: Request) -> str:
    """What a task says in prose, without its examples or the program that it is about; "" where that is all of it."""
    if benchmark == "mbpp":
        return request.text.partition(f"\n\n{mbpp.ASK}")[0]
    if benchmark == "canitedit":
        return "".join(request.sentences[1:])
    if benchmark == "humaneval":
        docstring = re.findall(r"(?:\"\"\"|''')(.*?)(?:\"\"\"|''')", request.text, re.DOTALL)
        return re.split(r">>>|\b(?:For )?[Ee]xamples?\b|==|=>|->", docstring[-1])[0] if docstring else ""
    return ""


class Runs:
    """Runs of tokens, of one or a few lengths, each with the places that hold it; looked for by number, all at once.

    Tokens are numbers from 1 on, 0 stands for one that is in no run.
    """

    def __init__(self, runs: Mapping[tuple[int, ...], list[Any]]) -> None:
        self.runs = dict(runs)
        self.hashes: dict[int, Tokens] = {}
        self.filter = np.zeros(1 << _FILTER_BITS, dtype=bool)
        for n in sorted({len(run) for run in runs}):
            hashes = _hashes(np.array([run for run in runs if len(run) == n], dtype=np.uint64).T)
            self.hashes[n] = np.sort(hashes)
            self.filter[hashes >> _SHIFT] = True

    def find(self, tokens: Tokens) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Each place of `tokens` where a run begins, with the run."""
        for n, known in self.hashes.items():
            hashes = _hashes([tokens[i : max(0, len(tokens) - n + 1) + i] for i in range(n)])
            places = np.flatnonzero(self.filter[hashes >> _SHIFT])
            nearest = np.searchsorted(known, hashes[places]).clip(max=len(known) - 1)
            for place in places[known[nearest] == hashes[places]].tolist():
                run = tuple(tokens[place : place + n].tolist())
                if run in self.runs:
                    yield place, run


class Index:
    """All tasks, ready to be looked for; it is pickled to the workers."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)
        self.numbers: dict[str, int] = {word: at for at, word in enumerate(sorted(_CALL_WORDS), 1)}
        runs: dict[tuple[int, ...], list[tuple[str, int]]] = defaultdict(list)
        whole = [words(t.text) for t in self.tasks]
        stated = [words(t.statement) for t in self.tasks]
        bare = [[w for w in words(t.text) if w not in _parts(t.names)] for t in self.tasks]
        for method, texts in (("verbatim", whole), ("statement", stated), ("renamed", bare)):
            for run, places in self._rare_runs(texts).items():
                runs[run] += [(method, at) for at in places]
        stated = [found or said for found, said in zip(stated, whole, strict=True)]
        frequent = Counter(word for found in stated for word in set(found))
        self.own_words = [
            {self.numbers[w] for w in found if frequent[w] <= FREQUENT and len(w) > 2 and w not in _CALL_WORDS}
            for found in stated
        ]
        self.runs = Runs(runs)
        self.rare = Counter(place for places in runs.values() for place in places)
        anchors: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        self.examples = [[self._numbered(example) for example in t.examples] for t in self.tasks]
        for at, examples in enumerate(self.examples):
            for number, example in enumerate(examples):
                anchors[example[:3]].append((at, number))
        self.anchors = Runs(anchors)
        values = [w.isdecimal() or w in ("true", "false", "none") for w in self.numbers]
        self.is_value = np.array([False, *values])
        self.bodies: dict[str, list[int]] = defaultdict(list)
        self.sizes = [sum(f.size for f in t.functions if not f.inner) for t in self.tasks]
        self.statements: dict[str, list[int]] = defaultdict(list)
        for at, t in enumerate(self.tasks):
            for function in t.functions:
                self.bodies[function.body].append(at)
                for part, _ in function.statements:
                    self.statements[part].append(at)
        for part in [part for part, found in self.statements.items() if len(set(found)) > 2 * COMMON]:
            del self.statements[part]
        self.weight = [
            sum(size for f in t.functions for part, size in f.statements if part in self.statements) for t in self.tasks
        ]

    def find(self, turns: Sequence[str]) -> list[Hit]:
        """The tasks that a row's turns hold, each once, in the index' order."""
        return self.find_all([turns])[0]

    def find_all(self, rows: Sequence[Sequence[str]]) -> list[list[Hit]]:
        """As `find`, for many rows; their tokens are looked for together."""
        texts = ["\n".join(turns)[:LONGEST] for turns in rows]
        numbers: list[int] = []
        ends: list[int] = []
        for text in texts:
            numbers += map(self.numbers.get, words(text), repeat(0))
            numbers.append(0)  # no run goes on into the next row
            ends.append(len(numbers))
        tokens = np.array(numbers, dtype=np.uint64)
        hits: list[dict[int, str]] = [{} for _ in rows]
        self._by_runs(tokens, ends, hits)
        self._by_examples(tokens, ends, hits)
        for text, found in zip(texts, hits, strict=True):
            if "def " in text:
                self._by_code(text, found)
        return [
            [Hit(self.tasks[at].benchmark, self.tasks[at].id, method) for at, method in sorted(found.items())]
            for found in hits
        ]

    def _numbered(self, found: Sequence[str]) -> tuple[int, ...]:
        return tuple([self.numbers.setdefault(word, len(self.numbers) + 1) for word in found])

    def _rare_runs(self, texts: Sequence[list[str]]) -> dict[tuple[int, ...], list[int]]:
        """Rare runs with the tasks that hold them."""
        runs: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for at, found in enumerate(texts):
            numbered = self._numbered(found)
            for run in sorted({numbered[i : i + RUN] for i in range(len(numbered) - RUN + 1)}):
                runs[run].append(at)
        return {run: places for run, places in runs.items() if len(places) < COMMON}

    def _by_runs(self, tokens: Tokens, ends: Sequence[int], hits: Sequence[dict[int, str]]) -> None:
        met: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        for place, run in self.runs.find(tokens):
            met[bisect_right(ends, place)].add(run)
        for row, found in met.items():
            counts = Counter(place for run in found for place in self.runs.runs[run])
            for method, at in sorted(counts, reverse=True):  # what stands there verbatim is called so
                rare = self.rare[method, at]
                if method != "statement" and counts[method, at] >= max(LEAST, SHARE * rare):
                    hits[row].setdefault(at, method)
                elif method == "statement" and counts[method, at] >= max(min(LEAST, rare), 2, STATED * rare):
                    hits[row][at] = "verbatim"

    def _by_examples(self, tokens: Tokens, ends: Sequence[int], hits: Sequence[dict[int, str]]) -> None:
        def begin(row: int) -> int:
            return ends[row - 1] if row else 0

        kept = np.flatnonzero((tokens == 0) | (tokens > len(_CALL_WORDS)))
        stream = tokens[kept]
        met: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for place, anchor in self.anchors.find(stream):
            here = tuple(stream[place : place + 24].tolist())
            for at, number in self.anchors.runs[anchor]:
                example = self.examples[at][number]
                if here[: len(example)] == example:
                    met[bisect_right(ends, kept[place]), at].append((place, number))
        for (row, at), places in met.items():
            near = self._near(at, places)
            said = tokens[begin(row) : ends[row]]
            if near and not (self._by_chance(at, near, said) and self.own_words[at].isdisjoint(said.tolist())):
                hits[row].setdefault(at, "examples")

    def _near(self, at: int, places: Sequence[tuple[int, int]]) -> set[int]:
        """Those of a task's examples that stand near one another and say enough together; none where they do not.

        `places` has where they stand, and which.
        """
        window = WINDOW + 2 * sum(map(len, self.examples[at]))
        alone = len(self.examples[at]) == 1
        for begin, _ in places:
            near = {number for place, number in places if begin <= place < begin + window}
            if self._says(at, near) >= (SAYS_ALONE if alone else SAYS) and len(near) >= (1 if alone else 2):
                return near
        return set()

    def _says(self, at: int, examples: Iterable[int]) -> float:
        return sum(_says(self.tasks[at].examples[number]) for number in examples)

    def _by_chance(self, at: int, near: Iterable[int], said: Tokens) -> bool:
        """Whether a row of many values might hold these examples as it might any others."""
        long = any(len(self.examples[at][number]) >= LONG for number in near)
        few = int(self.is_value[said].sum()) <= VALUES
        return self._says(at, near) < SAYS_MUCH and not (long and few)

    def _by_code(self, text: str, hits: dict[int, str]) -> None:
        whole: dict[int, dict[str, int]] = defaultdict(dict)
        met: dict[int, dict[str, int]] = defaultdict(dict)
        for function in _shown_functions(text):
            for at in self.bodies.get(function.body, ()):
                whole[at][function.body] = function.size
            for part, size in function.statements:
                for at in self.statements.get(part, ()):
                    met[at][part] = size
        for at, sizes in whole.items():
            if sum(sizes.values()) >= max(BODY, BODIES * self.sizes[at]):
                hits.setdefault(at, "code")
        for at, sizes in met.items():
            if sum(sizes.values()) >= max(STATEMENTS_LEAST, STATEMENTS * self.weight[at]):
                hits.setdefault(at, "code")


def _hashes(columns: Sequence[Tokens] | Tokens) -> Tokens:
    """A hash of each row of `columns`; its upper bits are its place in a filter."""
    first, *others = columns
    hashes = first * _ODD
    for column in others:
        hashes = (hashes ^ column) * _ODD
    return hashes ^ (hashes << np.uint64(32))


def _says(example: Sequence[str]) -> float:
    """How much an example says: its tokens, less those that count up from the one before or repeat it."""
    said = 0.0
    before = None
    for token in example:
        number = int(token) if token.isdecimal() and len(token) < 9 else None
        follows = number is not None and before is not None and number - before in (0, 1)
        said += 0.0 if follows else 1.0 if number is None or number < 100 else 1.5
        before = number
    return said


def _stream(text: str) -> tuple[str, ...]:
    return tuple(w for w in words(text) if w not in _CALL_WORDS)


def _asserted(tests: str) -> Iterator[tuple[str, ...]]:
    """Arguments and result of each assertion `f(...) == result` in code, as a stream of tokens."""
    tree = parsed(tests)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Assert):
            test = node.test
            pair = (test.left, test.comparators[0]) if isinstance(test, ast.Compare) else (test, None)
            call = next((n for n in ast.walk(pair[0]) if isinstance(n, ast.Call) and n.args), None)
            if call is not None and not any(isinstance(n, ast.Name) for a in call.args for n in ast.walk(a)):
                shown = [ast.unparse(argument) for argument in call.args]
                result = ast.unparse(pair[1]) if pair[1] is not None else ""
                if (example := _stream(" ".join([*shown, result]))) and len(example) > 1:
                    yield example[:24]


_SHOWN = re.compile(
    r">>>\s*[\w.]+\((?P<a>.*)\)[ \t]*\n\s*(?P<b>.+)"
    r"|\b[\w.]+\((?P<c>[^\n]*?)\)\s*(?:==|=>|->|➞|→|=|returns?|should (?:be|return))\s*(?P<d>[^\n]+)"
)
_SHOWN_VALUES = re.compile(r"\d|['\"]")


def _doctests(text: str) -> Iterator[tuple[str, ...]]:
    """Examples in prose or a docstring: `>>> f(x)` and its result, `f(x) == y` and its like."""
    for match in _SHOWN.finditer(text):
        example = _stream(f"{match['a'] or match['c'] or ''} {match['b'] or match['d'] or ''}")
        if len(example) > 1 and _SHOWN_VALUES.search(match.group()):
            yield example[:24]


def _code(text: str) -> str:
    """The Python in a text: its fenced blocks, or all of it where it has none."""
    if "```" not in text and "~~~" not in text:
        return text
    return "\n\n".join(block.text for block in split_blocks(text)[0])


def _functions(code: str) -> Iterator[Function]:
    """Each function in code, methods and inner ones too, but those that every class has."""
    tree = parsed(code)
    if tree is None:
        tree = _parse_defs(code)
    try:
        if tree is not None:
            own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            yield from _within(tree, own, inner=False)
    except (RecursionError, ValueError):  # code nested too deeply, a number of too many digits
        return


def _shown_functions(text: str) -> Iterator[Function]:
    """The functions in a text: in its fenced blocks, and those that stand between them."""
    code = _code(text)
    yield from _functions(code)
    if text.count("def ") > code.count("def "):
        for part in _DEFINITION.findall(text):
            if part not in code:
                yield from _functions(part)


def _within(node: ast.AST, own: set[str], inner: bool) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        found = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("__"):
            yield _skeleton(child, own, inner)
        if isinstance(child, ast.stmt):
            yield from _within(child, own, inner or found)


_DEFINITION = re.compile(r"^def .*(?:\n(?:[ \t].*|[ \t]*))*", re.MULTILINE)


def _parse_defs(code: str) -> ast.Module | None:
    """What can be read where the whole cannot: each top-level function by itself."""
    trees = [tree for part in _DEFINITION.findall(code) if (tree := parsed(part)) is not None]
    return ast.Module([statement for tree in trees for statement in tree.body], []) if trees else None


def _skeleton(function: ast.FunctionDef | ast.AsyncFunctionDef, own: set[str], inner: bool) -> Function:
    """`own` are the names of all functions in the code: they are numbered where they are called as methods, too."""
    body = function.body
    if (
        isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        body = body[1:]
    bound = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)} | own
    numbers = {function.name: -1}
    for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
        if argument.arg not in ("self", "cls"):  # a method is the same function
            numbers.setdefault(argument.arg, len(numbers))
    whole = " ".join(_dump(statement, numbers, bound) for statement in body)
    parts = []
    for statement in body:
        for part in ast.walk(statement):
            if isinstance(part, ast.stmt) and not isinstance(part, ast.FunctionDef | ast.ClassDef):
                shown = _dump(_head(part) if hasattr(part, "body") else part, {}, bound)
                if len(shown) >= STATEMENT:
                    parts.append((_hash(shown), len(shown)))
    return Function(_hash(whole), len(whole), tuple(parts), inner)


def _head(statement: Any) -> ast.AST:
    """What a compound statement tests or goes through, without its body."""
    for name in ("test", "iter", "subject"):
        if hasattr(statement, name):
            found = getattr(statement, name)
            return ast.Tuple([statement.target, found], ast.Load()) if name == "iter" else found
    return ast.Constant(type(statement).__name__)


def _dump(node: Any, numbers: dict[str, int], bound: set[str]) -> str:
    """A node as text, annotations left out; names that are no builtin's, or are `bound` to something else, are numbered
    in the order in which they come."""
    if isinstance(node, ast.Name):
        return (
            node.id
            if node.id in _BUILTINS and node.id not in bound
            else f"v{numbers.setdefault(node.id, len(numbers))}"
        )
    if isinstance(node, ast.arg):
        return f"v{numbers.setdefault(node.arg, len(numbers))}"
    if isinstance(node, ast.Attribute) and node.attr in bound:
        return f"Attribute({_dump(node.value, numbers, bound)},v{numbers.setdefault(node.attr, len(numbers))})"
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign([node.target], node.value)
    if isinstance(node, ast.AST):
        shown = [
            _dump(value, numbers, bound)
            for field, value in ast.iter_fields(node)
            if field not in ("ctx", "annotation", "returns", "type_comment", "type_params", "kind", "decorator_list")
            and not (field == "name" and isinstance(node, ast.FunctionDef))
        ]
        return f"{type(node).__name__}({','.join(shown)})"
    if isinstance(node, list):
        return ",".join(_dump(item, numbers, bound) for item in node)
    return repr(node)


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _own_names(code: str) -> Iterator[str]:
    """The names that code binds: functions, arguments, variables."""
    tree = parsed(code)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _parts(names: Iterable[str]) -> set[str]:
    return {part for name in names for part in words(name)}
