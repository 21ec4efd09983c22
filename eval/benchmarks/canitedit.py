"""CanItEdit: 105 Python programs to change by instruction (https://arxiv.org/abs/2312.12450).

Each row gives two requests, `canitedit/<id>/descriptive` and right behind it `canitedit/<id>/lazy`; the rows keep their
order. A request is the program in a fence, one piece, then the instruction, cut into sentences.

An answer is the whole new program, found by this rule (text is only read, nothing is executed):
1. The answer itself, where all of it is a program: it parses as Python, binds a name, and no statement at its top level
   begins with + or - (such a text is what is left of a diff).
2. Else the fenced blocks that are programs. The last one that binds all names which the tests take from the program
   wins, else the last one: a usage example, an excerpt or a shell line behind the program does no harm, and a second
   version counts. A block that the end of the answer left open counts if it is a program as it stands; nothing is
   repaired. Prose is welcome around a fence, and only there.
All else (a diff, a program cut in the middle, prose) scores 0 with the note "format".

Answer, blank line and tests run as upstream runs them, one file with one namespace: tests may put a mock in the place
of a name or read the source, and a name that hides a builtin hides it from the tests too. Unlike upstream the file is
loaded as a module, so a main guard stays shut.

A program may take 30 seconds, also where less is asked for: row 60 needs up to 20 when the machine is busy. `before` of
21, 53 and 95 fails by running on and on. Rows 47, 55 and 60 compare times; on a busy machine `before` of 60 can pass.
"""

import ast
import builtins
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder

from pydantic import Field

from eval.benchmarks import rows, scoring
from eval.benchmarks.protocol import Known, Metric, Score
from eval.benchmarks.scoring import Program
from eval.extract import parsed, split_blocks
from eval.interpreter import interpreter
from eval.sandbox import Limits
from headstart.request import Request
from headstart.sentences import split
from recipes.errors import UserError

NAME = "canitedit"
METRIC: Metric = "pass@1"
HUB = rows.Hub("nuprl/CanItEdit", "test")
SECONDS = 30.0  # the least

_BUILTINS = frozenset(dir(builtins))
# What `inspect` has to find is put into Python's cache of source lines, so that nothing is written to a disk.
_ONE_FILE = """\
def _compiled(source):
    import linecache
    lines = [line + "\\n" for line in source.split("\\n")]
    linecache.cache["answer.py"] = (len(source), None, lines, "answer.py")
    return compile(source, "answer.py", "exec", dont_inherit=True)
__file__ = "answer.py"
exec(_compiled({source!r}))
"""


class _Row(rows.Row):
    id: int
    before: str
    after: str
    tests: str
    instruction_descriptive: str = Field(min_length=1)
    instruction_lazy: str = Field(min_length=1)


def load(path: str | None) -> list[Request]:
    """Two requests a row, from the hub or from a local file or folder.

    `extra` has "before", "tests" and "needs": the modules outside of the standard library that the row imports.
    Raises UserError for rows that cannot be read, have another schema or come twice.
    """
    requests: dict[str, Request] = {}
    for row in rows.read(_Row, HUB, path):
        for request in _requests(row):
            if request.id in requests:
                raise UserError(f"{path or HUB.id}: id {row.id} is there twice; give one copy of the rows")
            requests[request.id] = request
    return list(requests.values())


def _requests(row: _Row) -> Iterator[Request]:
    needs = sorted(set().union(*(_third_party(code) for code in (row.before, row.after, row.tests))))
    for kind, instruction in (("descriptive", row.instruction_descriptive), ("lazy", row.instruction_lazy)):
        yield Request(
            id=f"{NAME}/{row.id}/{kind}",
            source=NAME,
            sentences=(_fenced(row.before), *split(f"\n\n{instruction}")),
            reference=_fenced(row.after),
            extra={"before": row.before, "tests": row.tests, "needs": needs},
        )


def _fenced(code: str) -> str:
    """`code` in a fence that is longer than any run of backticks in it."""
    fence = "`" * (max([2, *map(len, re.findall("`+", code))]) + 1)
    return f"{fence}python\n{code}\n{fence}"


def _third_party(code: str) -> set[str]:
    """The top names of all imported modules that Python does not bring along."""
    found = set[str]()
    for node in ast.walk(parsed(code) or ast.Module([], [])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names


def unfit(request: Request) -> str | None:
    """ "needs numpy, torch": the imported modules that are not where the sandbox looks for them; None if all are."""
    places = list(interpreter().packages)
    missing = [name for name in request.extra["needs"] if PathFinder.find_spec(name, places) is None]
    return f"needs {', '.join(missing)}" if missing else None


def known(request: Request) -> list[Known]:
    """The row's `after`, and its `before`, which the tests must refuse."""
    before = Known(_fenced(request.extra["before"]), "before")
    return [Known(request.reference), before] if request.reference is not None else [before]


def program(request: Request, answer: str) -> Program | str:
    """The file to run, in one piece and therefore without tests of its own, or the note "format"."""
    code = _extract(answer.replace("\r\n", "\n").replace("\r", "\n"), request.extra["tests"])
    return "format" if code is None else Program(_ONE_FILE.format(source=f"{code}\n\n{request.extra['tests']}"), "")


def score(requests: Sequence[Request], answers: Sequence[str], limits: Limits) -> list[Score]:
    """pass@1, one score a request; see `scoring.score`. A time limit below SECONDS is raised to that."""
    scores: dict[int, Score] = {}
    for native in (False, True):
        mine = [at for at, request in enumerate(requests) if bool(request.extra["needs"]) == native]
        own = replace(limits, seconds=max(SECONDS, limits.seconds), native=native)
        found = scoring.score([requests[at] for at in mine], [answers[at] for at in mine], program, own)
        scores |= zip(mine, found, strict=True)
    return [scores[at] for at in range(len(requests))]


def _extract(answer: str, tests: str) -> str | None:
    """The program in `answer` by the rule of this module's docstring, or None."""
    if _is_program(answer):
        return answer
    programs = [block.text for block in split_blocks(answer)[0] if _is_program(block.text)]
    taken = _used(tests) - _bound(tests) - _BUILTINS
    whole = [text for text in programs if taken <= _bound(text)]
    return next(reversed(whole or programs), None)


def _is_program(text: str) -> bool:
    tree = parsed(text)
    if tree is None or not _bound(text):
        return False
    lines = text.split("\n")
    return not any(lines[statement.lineno - 1].startswith(("+", "-")) for statement in tree.body)


def _bound(code: str) -> set[str]:
    """All names that `code` gives a meaning, at whatever depth; none where it does not parse."""
    found = set[str]()
    for node in ast.walk(parsed(code) or ast.Module([], [])):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


def _used(code: str) -> set[str]:
    nodes = ast.walk(parsed(code) or ast.Module([], []))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
