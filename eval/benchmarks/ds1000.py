"""DS-1000: 1000 problems with seven Python libraries, each with a gap in given code (https://arxiv.org/abs/2211.11501).

The request is the prompt as it is. The problem is cut by the sentence rule. The code around the gap, from its first
<code> on (and from "A:" where that stands right before it), is one last piece: no cut falls inside it, and what arrives
last is never the bare marker "BEGIN SOLUTION", which tells nothing and would flatter every figure. Matplotlib's prompts
are code throughout, without tags; the rule cuts them at blank lines.

The gap is at the top level or, in 71 rows, a function's body. What goes into it is found by this rule (text is only
read, nothing is executed):
1. Candidates are the fenced blocks and, in them and outside, what stands between <code> tags; text up to a first
   </code> counts, because the prompt ends in <code>. Without any: the whole answer, else the stretches of code in it.
2. A candidate has to parse and to do something; imports, values and the given code do nothing. One that the answer's
   end cut off loses its unfinished statement.
3. The last candidate that binds the variables which the prompt asks for (in a body: that returns) wins, else the last
   one. Where none parses, the last fenced block is taken as it stands, so that the error shows. Else: "extraction".
4. Lines BEGIN SOLUTION and END SOLUTION and the tags go. Given code that is repeated at the start goes too, but for its
   imports: run again, it would put the example in the place of the test's input. In Matplotlib's rows, where the input
   is the example, only a repetition of all of it goes, since some tasks ask for the plot once more.
5. For a body: of a whole function its body is taken, and the imports, functions and classes beside it go in before it,
   but for given imports: a name that the body imports is unknown to what stands before the gap. What follows a return
   goes. A body that is not indented by four is moved there, also if its first line alone has lost its indentation.
What needs no such change stays as it is written; the rest is written anew from its syntax tree, without comments.

The program is the row's `code_context`, then `test_execution`, then `test_string` where the row has one, each with the
solution as a string. It runs under `.venv-ds1000` with the library versions that the rows were written for. The tests
hold their own solution beside the answer; an answer that looks for it there is not stopped.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path

from pydantic import Field

from eval import sandbox
from eval.benchmarks import rows, scoring
from eval.benchmarks.protocol import Known, Metric, Score
from eval.benchmarks.scoring import Program
from eval.extract import Block, _head, _parse, _statements, split_blocks
from eval.interpreter import interpreter
from eval.sandbox import Limits, SandboxError
from headstart.request import Request
from headstart.sentences import split
from recipes.errors import UserError

NAME = "ds1000"
METRIC: Metric = "pass@1"
HUB = rows.Hub("xlangai/DS-1000", "test")
PYTHON = Path(__file__).resolve().parents[2] / ".venv-ds1000" / "bin" / "python"
SECONDS, MEMORY_MB = 60.0, 2048  # the least: row 849 computes for 11 s; the references alone do with 1024 MiB
NETWORK = "the network"  # no module has such a name, so it is always missing
INDENT = "    "

_PACKAGES = {"Pandas": "pandas", "Numpy": "numpy", "Matplotlib": "matplotlib", "Sklearn": "sklearn", "Scipy": "scipy"}
_PACKAGES |= {"Pytorch": "torch", "Tensorflow": "tensorflow"}
_DOWNLOADS = re.compile(r"load_dataset|fetch_\w+")  # seaborn's and scikit-learn's
_TAIL = re.compile(r"\s*(?:^A:\s*)?^<code>$.*", re.MULTILINE | re.DOTALL)
_ASKED = re.compile(r"^([\w, ]+) = \.\.\. # put solution", re.MULTILINE)
_BODY = re.compile(r"^[ \t]+#+ BEGIN SOLUTION\s*\Z", re.MULTILINE)
_MARKS = re.compile(r"^[ \t]*#*[ \t]*(?:(?:BEGIN|END) SOLUTION|SOLUTION (?:START|END))[ \t]*$|</?code>", re.MULTILINE)
_SETTINGS = "import os\nos.environ['MPLBACKEND'] = 'Agg'\n"


class _Metadata(rows.Row):
    problem_id: int
    library: str


class _Row(rows.Row):
    prompt: str = Field(min_length=1)
    reference_code: str
    metadata: _Metadata
    code_context: str


@dataclass(frozen=True)
class Gap:
    """What surrounds the answer: the given statements (`ast.dump`), the function whose body is missing (None at the
    top level), the names to bind, and whether only a repetition of all that is given may be taken out."""

    given: tuple[str, ...]
    function: str | None
    asked: frozenset[str]
    all_or_none: bool


@dataclass(frozen=True)
class Fit:
    """A candidate made ready for the gap; `complete` tells whether it binds or returns what is asked for."""

    code: str
    complete: bool


def load(path: str | None) -> list[Request]:
    """All rows in their order, from the hub or from a local file or folder.

    `extra` has "code_context" and "needs": the modules outside of the standard library that the row imports.
    Raises UserError for rows that cannot be read, have another schema or come twice.
    """
    requests: dict[int, Request] = {}
    for row in rows.read(_Row, HUB, path):
        number = row.metadata.problem_id
        if number in requests:
            raise UserError(f"{path or HUB.id}: problem_id {number} is there twice; give one copy of the rows")
        requests[number] = Request(
            id=f"{NAME}/{number}",
            source=NAME,
            sentences=tuple(pieces(row.prompt)),
            reference=f"```python\n{row.reference_code}\n```",
            extra={"code_context": row.code_context, "needs": _needs(row)},
        )
    return list(requests.values())


def pieces(prompt: str) -> list[str]:
    """The problem's sentences, then the code around the gap as one piece."""
    tail = _TAIL.search(prompt)
    return [*split(prompt[: tail.start()]), tail.group()] if tail else split(prompt)


def _needs(row: _Row) -> list[str]:
    """The top names of the modules that the row's code imports or its library stands for; NETWORK for a download."""
    context = _nodes(row.code_context)
    strings = [node.value for node in context if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    filling = f"{INDENT}None" if _BODY.search(row.prompt) else "None"
    texts = [text.replace("[insert]", filling) for text in strings if "\n[insert]" in text]
    nodes = context + [node for text in (*texts, _flush(row.reference_code)[0]) for node in _nodes(text)]
    found = {_PACKAGES.get(row.metadata.library, row.metadata.library)}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            found |= {NETWORK} if _DOWNLOADS.fullmatch(name) else set()
    return sorted(found - sys.stdlib_module_names)


def _nodes(code: str) -> list[ast.AST]:
    tree = _parse(code)
    return list(ast.walk(tree)) if isinstance(tree, ast.Module) else []


def unfit(request: Request) -> str | None:
    """ "needs torch": what the row needs and the interpreter that scores does not have; None if it has all."""
    if not PYTHON.exists():
        return f"needs {PYTHON.parents[1].name}: run `make ds1000-env`"
    places = interpreter(str(PYTHON)).packages
    missing = [name for name in request.extra["needs"] if PathFinder.find_spec(name, list(places)) is None]
    return f"needs {', '.join(missing)}" if missing else None


def known(request: Request) -> list[Known]:
    """The row's own solution."""
    return [Known(request.reference)] if request.reference is not None else []


def program(request: Request, answer: str) -> Program | str:
    """The program to run and its tests, or the note "extraction"."""
    code = solution(answer, request.text)
    if code is None:
        return "extraction"
    context = request.extra["code_context"]
    calls = [name for name in ("test_execution", "test_string") if f"\ndef {name}(" in f"\n{context}"]
    tests = "".join(f"{name}(solution)\n" for name in calls)
    return Program(f"{_SETTINGS}{context}", f"solution = {code!r}\n{tests}")


def score(requests: Sequence[Request], answers: Sequence[str], limits: Limits) -> list[Score]:
    """pass@1, one score a request, under `fitted(limits)`; see `scoring.score`.

    Raises SandboxError also where a known answer gets the wrong verdict there, or where a library does not load.
    """
    limits = fitted(limits)
    if requests:
        _check(sorted({name for request in requests for name in request.extra["needs"]} - {NETWORK}), limits)
    return scoring.score(requests, answers, program, limits)


def fitted(limits: Limits) -> Limits:
    """`limits` with this benchmark's interpreter, raised to the least that its rows need."""
    seconds, memory_mb = max(limits.seconds, SECONDS), max(limits.memory_mb, MEMORY_MB)
    return replace(limits, seconds=seconds, memory_mb=memory_mb, python=str(PYTHON), native=True)


def _check(libraries: Sequence[str], limits: Limits) -> None:
    sandbox.check(limits)
    verdict = sandbox.run_tests("".join(f"import {name}\n" for name in libraries), "", limits)
    if not verdict.passed:
        raise SandboxError(f"{', '.join(libraries)} cannot be loaded ({verdict.note}); run `make ds1000-env` again")


# --- from the answer to the gap ---


def gap(prompt: str) -> Gap:
    """The gap at the end of `prompt`. Given code that does not parse (row 730) counts as none."""
    tail = _TAIL.search(prompt)
    code, _, rest = (tail.group() if tail else prompt).partition("\n</code>")
    code = code.partition("<code>\n")[2] if tail else code
    body = _BODY.search(prompt) or code.endswith(":")  # row 978: the function is left open, the marker is outside
    asked = _ASKED.search(rest)
    tree = _parse(code + (f"\n{INDENT}pass" if body else "") + (f"\n{asked[1]} = ..." if asked else ""))
    given = tree.body if isinstance(tree, ast.Module) else []
    inner = given[-1].body if body and given and isinstance(given[-1], ast.FunctionDef) else []
    names = re.findall(r"^def (\w+)", code, re.MULTILINE)
    return Gap(
        given=tuple(ast.dump(node) for node in (*given, *inner) if body or not _imports(node)),
        function=names[-1] if body and names else None,
        asked=frozenset(name.strip() for name in asked[1].split(",")) if asked else frozenset(),
        all_or_none=tail is None,
    )


def solution(answer: str, prompt: str) -> str | None:
    """What goes into the gap, by the rule of this module's docstring; None where nothing is found."""
    where = gap(prompt)
    blocks, prose = split_blocks(answer.replace("\r\n", "\n"))
    candidates = [part for block in blocks for part in (block, *_tagged(block.text))] + _tagged(prose)
    fits = [fit for block in candidates if (fit := _fit(block.text, where, None if block.closed else _head))]
    if not fits:
        prose = _MARKS.sub("", prose)
        whole = _fit(prose, where)
        fits = [whole] if whole else [fit for text in _stretches(prose) if (fit := _fit(text, where))]
    if not fits:
        return blocks[-1].text if blocks else None
    return ([fit for fit in fits if fit.complete] or fits)[-1].code


def _tagged(text: str) -> list[Block]:
    """What stands between <code> and </code>; a first </code> closes what the prompt's last line opened."""
    first = re.search("</?code>", text)
    text = f"<code>{text}" if first and first.group() == "</code>" else text
    return [Block(found[1], found[2] != "") for found in re.finditer(r"<code>(.*?)(</code>|\Z)", text, re.DOTALL)]


def _stretches(prose: str) -> Iterator[str]:
    """Runs of whole statements in text, each begun where a paragraph begins or behind a colon."""
    lines, at = prose.split("\n"), 0
    while at < len(lines):
        before = lines[at - 1].strip() if at else ""
        code = _statements(_flush("\n".join(lines[at:]))[0]) if not before or before.endswith(":") else ""
        size = code.count("\n") + 1
        if code.strip():
            yield "\n".join(lines[at : at + size])
        at += size


def _fit(text: str, where: Gap, head: Callable[[str], str] | None = None) -> Fit | None:
    """`text` made ready for the gap, or None where it does not parse or does nothing; `head` cuts an unfinished end."""
    text = _MARKS.sub("", text).strip("\n").rstrip()
    flat, width = _flush(text)
    code = head(flat) if head else flat
    tree = _parse(code)
    if not isinstance(tree, ast.Module):
        lost = where.function is not None and text[:1].strip() != ""  # the first line's indentation
        return _fit(INDENT + text, where, head) if lost else None
    own = _own(tree.body, where)
    if not any(map(_acts, own)):
        return None
    if own != tree.body or where.function is not None:
        same = own == tree.body and code == flat and width == len(INDENT)
        code = text if same else "\n".join(map(ast.unparse, own))
        code = code if same or where.function is None else textwrap.indent(code, INDENT)
    return Fit(code, _complete(own, where))


def _flush(text: str) -> tuple[str, int]:
    """`text` moved to the left by the indentation of its first line of code, and that width. Lines with less stay."""
    lines = text.split("\n")
    first = next((line for line in lines if line.strip() and line.lstrip()[0] != "#"), "")
    width = len(first) - len(first.lstrip())
    return "\n".join(line if line[:width].strip() else line[width:] for line in lines), width


def _own(body: list[ast.stmt], where: Gap) -> list[ast.stmt]:
    """The statements for the gap: of the function that is asked for its body, and nothing that only repeats."""
    if where.function is None:
        return _unrepeated(body, where)
    named = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == where.function]
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    beside = [node for node in body if isinstance(node, kinds) and node not in named] if named else []
    inner = named[-1].body if named else body
    end = next((at for at, node in enumerate(inner) if isinstance(node, ast.Return)), len(inner))
    return [*_unrepeated(beside, where), *_unrepeated(inner[: end + 1], where)]


def _unrepeated(body: Sequence[ast.stmt], where: Gap) -> list[ast.stmt]:
    """`body` without the given statements that it begins with."""
    left, kept, at = list(where.given), list[ast.stmt](), 0
    for node in body:
        if ast.dump(node) in left:
            left.remove(ast.dump(node))
        elif _imports(node):
            kept.append(node)
        else:
            break
        at += 1
    return list(body) if where.all_or_none and left else [*kept, *body[at:]]


def _imports(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _acts(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.AnnAssign):
        return node.value is not None
    return not _imports(node) and not isinstance(node, ast.Pass)


def _complete(own: Sequence[ast.stmt], where: Gap) -> bool:
    nodes = [node for statement in own for node in ast.walk(statement)]
    if where.function is not None and not where.asked:
        return any(isinstance(node, ast.Return) for node in nodes)
    places = [node for node in nodes if isinstance(node, ast.Name | ast.Subscript | ast.Attribute)]
    stored = [ast.unparse(node) for node in places if isinstance(node.ctx, ast.Store)]
    stored += [node.name for node in own if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return where.asked <= {re.split(r"[.\[]", place)[0] for place in stored}  # df["a"] = 1 binds df, too
