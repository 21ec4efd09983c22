"""Benchmark tasks as other people would write them down again: test material for finding leaked tasks.

Four functions turn a task into an (instruction, answer) pair as it would stand in an instruction-tuning corpus:
verbatim, renamed, reworded and same_solution. All of them are deterministic and work on rows given at run time.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import io
import keyword
import re
import symtable
import tokenize
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Task:
    """One benchmark task; the benchmark is the part of the id before the slash.

    statement: the prose (MBPP text, HumanEval docstring, CanItEdit instruction).
    code: what the request shows (HumanEval prompt, CanItEdit program before the edit, nothing for MBPP).
    tests: runnable after the solution. solution: the whole reference program.
    """

    id: str
    statement: str
    code: str
    tests: str
    solution: str


Pair = tuple[str, str]


# ---------------------------------------------------------------------------------------------------- loaders


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def mbpp(rows: Iterable[Mapping[str, Any]]) -> list[Task]:
    """Tasks from MBPP rows; setup code, where there is any, precedes the tests."""
    tasks = []
    for row in rows:
        tests = [row.get("test_setup_code") or "", *row["test_list"]]
        joined = "\n".join(_lines(test).strip() for test in tests if test.strip())
        tasks.append(Task(f"mbpp/{row['task_id']}", row["text"].strip(), "", joined, _lines(row["code"]).strip()))
    return tasks


def humaneval(rows: Iterable[Mapping[str, Any]]) -> list[Task]:
    """Tasks from HumanEval rows (the values of read_problems)."""
    tasks = []
    for row in rows:
        prompt, solution = _lines(row["prompt"]), _lines(row["prompt"] + row["canonical_solution"])
        tests = f"{_lines(row['test'])}\n\ncheck({row['entry_point']})"
        tasks.append(Task(row["task_id"], _docstring(prompt, row["entry_point"]), prompt, tests, solution))
    return tasks


def canitedit(rows: Iterable[Mapping[str, Any]]) -> list[Task]:
    """Tasks from CanItEdit rows, with the descriptive instruction."""
    return [
        Task(
            f"canitedit/{row['id']}",
            _lines(row["instruction_descriptive"]).strip(),
            _lines(row["before"]),
            _lines(row["tests"]),
            _lines(row["after"]),
        )
        for row in rows
    ]


def _docstring(prompt: str, entry: str) -> str:
    """The description inside a HumanEval prompt, even where it is not the first statement of the function."""
    for node in ast.walk(ast.parse(prompt)):
        if isinstance(node, ast.FunctionDef) and node.name == entry:
            for part in node.body:
                if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                    return inspect.cleandoc(str(part.value.value))
    return ""


def _kind(task: Task) -> str:
    return task.id.split("/")[0].lower()


def _entry(task: Task) -> str:
    """The function that the tests call, or an empty string for an edit task."""
    if _kind(task) == "humaneval":
        return task.tests.rsplit("check(", 1)[1].rstrip(")\n ")
    if _kind(task) == "mbpp":
        defined = re.findall(r"^\s*(?:def|class)\s+(\w+)", task.solution, re.M)
        called = re.findall(r"(\w+)\s*\(", " ".join(_asserts(task)))
        return next((name for name in called if name in defined), defined[-1] if defined else "solve")
    return ""


def _asserts(task: Task) -> list[str]:
    return [line.strip() for line in task.tests.splitlines() if line.strip().startswith("assert")]


def _fence(code: str) -> str:
    return f"```python\n{code.strip(chr(10)).rstrip()}\n```"


def _pick(options: Sequence[Any], *seed: object) -> Any:
    """One of the options, always the same for the same seed."""
    return options[_hash("|".join(map(str, seed))) % len(options)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


# ---------------------------------------------------------------------------------------------------- renaming

_VARIABLES: dict[str, tuple[str, ...]] = {
    "i": ("idx", "pos", "index", "cursor"),
    "j": ("inner", "jdx", "other_idx", "probe"),
    "k": ("step", "offset", "shift_by", "kth"),
    "n": ("num", "limit", "amount", "upper"),
    "m": ("width", "factor", "second_num", "cols"),
    "a": ("left", "first_value", "alpha", "one"),
    "b": ("right", "second_value", "beta", "two"),
    "c": ("third", "symbol", "gamma", "extra"),
    "d": ("delta", "lookup", "gap", "fourth"),
    "e": ("entry", "member", "unit"),
    "f": ("func", "ratio", "handle"),
    "g": ("grid_part", "group", "guess"),
    "h": ("tall", "height_value", "half"),
    "l": ("values", "items", "entries", "seq"),
    "p": ("point", "power", "chance", "modulus"),
    "q": ("queue_items", "quotient", "query"),
    "r": ("rad", "remainder", "row_no", "rest"),
    "s": ("text", "phrase", "content", "chunk"),
    "t": ("target", "total_time", "pair_item", "tail"),
    "v": ("val", "vertex", "content_value"),
    "w": ("weight_value", "token", "wide"),
    "x": ("value", "item", "elem_x", "current"),
    "y": ("other_value", "partner", "inner_item", "second"),
    "z": ("third_value", "final_item", "zeta"),
    "arr": ("values", "numbers_in", "sequence", "data"),
    "lst": ("values", "entries", "sequence", "data"),
    "list1": ("first_items", "values", "seq_a"),
    "list2": ("second_items", "others", "seq_b"),
    "nums": ("values", "numbers_in", "figures"),
    "numbers": ("values", "figures", "num_list"),
    "str": ("text", "phrase", "given_text"),
    "str1": ("text", "phrase", "first_text"),
    "string": ("text", "phrase", "source"),
    "text": ("phrase", "content", "message_text"),
    "sum": ("total", "running_total", "acc"),
    "total": ("acc", "running_sum", "overall"),
    "res": ("result", "outcome", "collected"),
    "result": ("outcome", "answer_value", "collected"),
    "ans": ("result", "outcome", "final_value"),
    "count": ("tally", "hits", "counter_value"),
    "cnt": ("tally", "hits", "counter_value"),
    "ctr": ("tally", "hits", "counter_value"),
    "temp": ("holder", "spare", "buffer"),
    "tmp": ("holder", "spare", "buffer"),
    "test_list": ("records", "entries", "tuple_rows"),
    "test_tup": ("record", "fields", "given_tuple"),
    "test_tup1": ("record_a", "fields_a", "left_tuple"),
    "test_tup2": ("record_b", "fields_b", "right_tuple"),
    "size": ("length_value", "how_many", "extent"),
    "word": ("term", "token"),
    "words": ("terms", "tokens"),
    "key": ("label", "field_name"),
    "value": ("content_value", "amount_value"),
    "node": ("vertex", "knot"),
    "idx": ("pos", "place", "index_a"),
    "idx2": ("pos_b", "place_b", "index_b"),
    "elem": ("entry", "member", "current"),
    "elem2": ("entry_b", "member_b", "candidate_b"),
    "element": ("entry", "member", "current"),
    "ch": ("letter", "symbol", "mark"),
    "char": ("letter", "symbol", "mark"),
    "threshold": ("cutoff", "bound"),
    "distance": ("gap", "spacing"),
    "ele": ("entry", "member"),
    "sub": ("part", "inner"),
    "tup": ("record", "row"),
    "dp": ("table", "memo"),
    "maxi": ("best", "peak"),
    "mini": ("lowest", "floor_value"),
    "data": ("payload", "dataset", "raw"),
}

_PARTS: dict[str, tuple[str, ...]] = {
    "find": ("locate", "get", "determine"),
    "get": ("fetch", "obtain", "find"),
    "check": ("verify", "validate", "test"),
    "is": ("check", "test_if", "has_property"),
    "remove": ("drop", "strip", "delete"),
    "delete": ("drop", "erase"),
    "count": ("tally", "num", "total"),
    "sum": ("total", "add_up"),
    "add": ("append", "plus", "insert"),
    "max": ("largest", "biggest", "top"),
    "min": ("smallest", "least", "lowest"),
    "maximum": ("largest", "top"),
    "minimum": ("smallest", "lowest"),
    "largest": ("max", "biggest"),
    "smallest": ("min", "least"),
    "list": ("seq", "items", "sequence"),
    "lists": ("seqs", "sequences"),
    "array": ("values", "seq"),
    "arr": ("values", "seq"),
    "string": ("text", "phrase"),
    "str": ("text", "txt"),
    "number": ("value", "figure"),
    "numbers": ("values", "figures"),
    "num": ("number", "val"),
    "nums": ("numbers", "vals"),
    "element": ("item", "entry"),
    "elements": ("items", "entries"),
    "tuple": ("record", "group"),
    "tuples": ("records", "groups"),
    "dict": ("mapping", "lookup"),
    "sort": ("order", "arrange"),
    "sorted": ("ordered", "arranged"),
    "convert": ("turn", "transform"),
    "calculate": ("compute", "work_out"),
    "cal": ("compute", "calc"),
    "compute": ("calculate", "evaluate"),
    "extract": ("pull", "select"),
    "replace": ("swap", "substitute"),
    "reverse": ("flip", "invert"),
    "split": ("cut", "divide"),
    "merge": ("join", "combine"),
    "first": ("leading", "initial"),
    "last": ("final", "trailing"),
    "digit": ("figure", "numeral"),
    "digits": ("figures", "numerals"),
    "char": ("letter", "symbol"),
    "chars": ("letters", "symbols"),
    "word": ("term", "token"),
    "words": ("terms", "tokens"),
    "length": ("size", "len"),
    "len": ("size", "length"),
    "common": ("shared", "mutual"),
    "product": ("multiplied", "prod"),
    "diff": ("gap", "delta"),
    "difference": ("gap", "delta"),
    "area": ("surface", "region"),
    "volume": ("capacity", "space"),
    "index": ("position", "idx"),
    "frequency": ("occurrences", "freq"),
    "freq": ("frequency", "occurrences"),
    "text": ("phrase", "content"),
    "match": ("fits", "matching"),
    "pair": ("couple", "duo"),
    "pairs": ("couples", "duos"),
    "node": ("vertex", "knot"),
    "value": ("content", "amount"),
    "res": ("result", "outcome"),
    "result": ("outcome", "final"),
    "print": ("show", "emit"),
    "same": ("equal", "identical"),
    "test": ("given", "sample"),
    "new": ("fresh", "updated"),
    "total": ("overall", "sum"),
    "current": ("active", "cur"),
    "make": ("build", "create"),
    "create": ("build", "make"),
    "filter": ("select", "keep"),
    "binary": ("base_two", "bits"),
    "name": ("label", "title"),
    "row": ("line", "record"),
    "col": ("column", "field"),
    "start": ("begin", "low"),
    "end": ("stop", "high"),
    "game": ("match", "play"),
    "graph": ("network", "mesh"),
    "board": ("field", "grid"),
    "parse": ("read", "decode"),
    "update": ("refresh", "adjust"),
    "player": ("contestant", "gamer"),
    "matrix": ("grid", "table"),
    "vector": ("array", "coords"),
    "train": ("fit", "learn"),
    "message": ("note", "notice"),
    "id": ("key", "ident"),
}

_AFFIXES = {
    "function": ("compute_{}", "{}_of", "solve_{}", "{}_result", "run_{}"),
    "class": ("Basic{}", "{}Unit", "Simple{}", "{}Model"),
    "variable": ("{}_val", "cur_{}", "the_{}", "my_{}"),
}

_BUILTIN_ATTRIBUTES = {
    name
    for kind in (str, bytes, list, dict, set, tuple, int, float, complex, frozenset, io.StringIO, Exception)
    for name in dir(kind)
}


@dataclass
class _Names:
    """The names that a program defines, by sort."""

    functions: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    fixed: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)


def _parse(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError):
        return None


def _builtins_in_use(code: str) -> set[str]:
    """Builtins that some scope reads without binding them itself."""
    found: set[str] = set()

    top = symtable.symtable(code, "<code>", "exec")
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()}

    def visit(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            name = symbol.get_name()
            unbound = symbol.is_global() or table.get_type() == "module"
            if hasattr(builtins, name) and name not in own and unbound and symbol.is_referenced():
                found.add(name)
        for child in table.get_children():
            visit(child)

    visit(top)
    return found


def _collect(code: str, names: _Names) -> None:
    """Adds the names of one program."""
    tree = _parse(code)
    if tree is None:
        names.functions.update(re.findall(r"^def\s+(\w+)", code, re.M))
        names.classes.update(re.findall(r"^class\s+(\w+)", code, re.M))
        names.attributes.update(re.findall(r"\.\s*(\w+)", code))
        return
    names.fixed |= _builtins_in_use(code)
    local_classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    names.fixed |= imported
    in_class: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names.classes.add(node.name)
            bases = {ast.unparse(base).split("[")[0] for base in node.bases}
            own = bases <= local_classes | {"ABC", "object", "Generic", "Protocol"}
            for part in node.body:
                in_class.add(part)
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    (names.methods if own else names.attributes).add(part.name)
                elif isinstance(part, ast.Assign | ast.AnnAssign):
                    targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                    names.fixed |= {t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node not in in_class:
                names.functions.add(node.name)
        elif isinstance(node, ast.arg):
            names.parameters.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.variables.add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.variables.add(node.name)
        elif isinstance(node, ast.Attribute):
            foreign = isinstance(node.value, ast.Name) and node.value.id in imported
            if foreign or isinstance(node.ctx, ast.Store):
                names.attributes.add(node.attr)
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            names.fixed.add(node.name)


def _words_of(name: str) -> list[str]:
    return [part for part in re.split(r"_+|(?<=[a-z0-9])(?=[A-Z])", name) if part]


def _fresh_name(name: str, sort: str, seed: str, taken: set[str]) -> str:
    """Another sensible name for the same thing."""
    options: list[str] = []
    if sort == "variable":
        known = _VARIABLES.get(name, _VARIABLES.get(name.lower(), ()))
        start = _hash(f"{seed}{name}") % max(len(known), 1)
        options += [*known[start:], *known[:start]]
    parts = _words_of(name)
    swapped = [_pick(_PARTS[part.lower()], seed, part) if part.lower() in _PARTS else part for part in parts]
    if swapped != parts:
        if sort == "class":
            options.append("".join(word[:1].upper() + word[1:] for part in swapped for word in part.split("_")))
        else:
            options.append("_".join(part.lower() for part in swapped))
    stem = name if sort == "class" else "_".join(part.lower() for part in parts) or "item"
    affixes = _AFFIXES[sort]
    start = _hash(f"{name}{seed}") % len(affixes)
    options += [affix.format(stem) for affix in (*affixes[start:], *affixes[:start])]
    options += [f"{stem}_{number}" for number in range(2, 60)]
    for option in options:
        if option not in taken and option.isidentifier() and not keyword.iskeyword(option):
            return option
    raise AssertionError(name)


@dataclass(frozen=True)
class _Renaming:
    """Old to new names; attributes (methods) are separate, since they only count behind a dot or in a class."""

    plain: dict[str, str]
    methods: dict[str, str]
    parameters: frozenset[str]
    callables: frozenset[str]


def _renaming(task: Task, seed: str, entry: str = "") -> _Renaming:
    """One consistent renaming for statement, code, tests and solution; entry is a name wanted for the entry point."""
    names = _Names()
    for code in (task.code, task.solution):
        _collect(code, names)
    tests = _Names()
    _collect(task.tests, tests)
    fixed = names.fixed | (tests.fixed - names.functions - names.classes) | {"self", "cls", "_", "args", "kwargs"}
    if _kind(task) == "humaneval":
        fixed |= {"check", "candidate"}
    everything = "\n".join((task.code, task.solution, task.tests))
    taken = set(re.findall(r"\w+", everything)) | set(dir(builtins)) | fixed
    plain: dict[str, str] = {}
    for sort, group in (
        ("class", names.classes),
        ("function", names.functions),
        ("variable", names.parameters | names.variables),
    ):
        for name in sorted(group - fixed - plain.keys()):
            if name.startswith("__"):
                continue
            wanted = entry if entry and name == _entry(task) and entry not in taken else ""
            plain[name] = wanted or _fresh_name(name, sort, seed, taken)
            taken.add(plain[name])
    methods: dict[str, str] = {}
    dynamic = re.search(r"\b(getattr|hasattr|setattr)\b", everything)
    for name in sorted(names.methods - names.attributes - tests.attributes - _BUILTIN_ATTRIBUTES):
        if not name.startswith("__") and not dynamic:
            methods[name] = _fresh_name(name, "function", seed, taken)
            taken.add(methods[name])
    called = frozenset(names.functions | names.classes | names.methods)
    return _Renaming(plain, methods, frozenset(names.parameters), called)


def _char_column(line: str, column: int) -> int:
    return len(line.encode()[:column].decode(errors="ignore"))


@dataclass
class _Places:
    """Positions in a program where a token needs care."""

    keywords: dict[tuple[int, int], bool] = field(default_factory=dict)
    definitions: set[tuple[int, str]] = field(default_factory=set)
    annotations: set[tuple[int, int]] = field(default_factory=set)
    docstrings: set[tuple[int, int]] = field(default_factory=set)
    imports: set[int] = field(default_factory=set)


def _places(code: str, called: frozenset[str]) -> _Places:
    places, lines = _Places(), code.split("\n")
    tree = _parse(code)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            own = name in called or name in ("__init__", "cls")
            for word in node.keywords:
                column = _char_column(lines[word.lineno - 1], word.col_offset)
                places.keywords[word.lineno, column] = own
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    places.definitions.add((part.lineno, part.name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            places.imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            places.docstrings.add((node.lineno, _char_column(lines[node.lineno - 1], node.col_offset)))
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            for part in ast.walk(note) if isinstance(note, ast.AST) else ():
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    places.annotations.add((part.lineno, _char_column(lines[part.lineno - 1], part.col_offset)))
    return places


def _splice(code: str, edits: list[tuple[tuple[int, int], tuple[int, int], str]]) -> str:
    starts = [0]
    for line in code.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    for (row, column), (end_row, end_column), text in sorted(edits, reverse=True):
        code = code[: starts[row - 1] + column] + text + code[starts[end_row - 1] + end_column :]
    return code


def _regex_rename(code: str, names: Mapping[str, str]) -> str:
    return re.sub(r"(?<![\w.])[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), code)


def _rename_code(code: str, names: _Renaming, prose: Callable[[str], str] | None = None) -> str:
    """The program with its names changed; prose rewrites comments and docstrings."""
    rewrite = prose or (lambda text: _rename_prose(text, names))
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (tokenize.TokenError, SyntaxError):
        return _regex_rename(code, names.plain)
    places = _places(code, names.callables)
    edits = []
    before = ""
    for token in tokens:
        row, text = token.start[0], token.string
        new = text
        if token.type == tokenize.NAME and row not in places.imports:
            if before == "." or (before == "def" and (row, text) in places.definitions):
                new = names.methods.get(text, text)
            elif not (token.start in places.keywords and not places.keywords[token.start]):
                new = names.plain.get(text, text)
        elif token.type == tokenize.STRING:
            if token.start in places.docstrings:
                new = _in_quotes(text, rewrite)
            elif token.start in places.annotations:
                new = _regex_rename(text, names.plain)
            elif re.match(r"(?i)r?f", text):
                new = _rename_fstring(text, names)
        elif token.type == tokenize.COMMENT:
            new = "#" + rewrite(text[1:])
        if new != text:
            edits.append((token.start, token.end, new))
        if token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE):
            before = text
    return _splice(code, edits)


def _in_quotes(literal: str, rewrite: Callable[[str], str]) -> str:
    match = re.fullmatch(r"(?s)([rRuUbB]*)(\"\"\"|'''|\"|')(.*)\2", literal)
    if not match:
        return literal
    return match[1] + match[2] + rewrite(match[3]) + match[2]


def _rename_fstring(literal: str, names: _Renaming) -> str:
    def inside(match: re.Match[str]) -> str:
        text = _regex_rename(match[0], names.plain)
        return re.sub(r"\.(\w+)(?=\()", lambda part: "." + names.methods.get(part[1], part[1]), text)

    return re.sub(r"(?<!\{)\{[^{}]+\}", inside, literal)


def _rename_prose(text: str, names: _Renaming, ticks: bool = False) -> str:
    """Renames what reads as a name of the program, and leaves plain English words alone; ticks sets names off."""
    both = {**names.methods, **names.plain}

    def swap(match: re.Match[str]) -> str:
        name = match[0]
        if name not in both:
            return name
        before, after = text[: match.start()], text[match.end() :]
        quoted = before[-1:] in ("`", "'", '"') and after[:1] in ("`", "'", '"')
        in_code = before.count("`") % 2 == 1 or after[:1] == "(" or re.match(r"\s*(=|\[)", after) is not None
        telling = "_" in name or any(c.isdigit() for c in name) or re.search(r"[a-z][A-Z]", name) is not None
        letter = len(name) == 1 and name not in "aiIA" and name in names.parameters
        letter = letter and not re.match(r"[-'’]?th\b|['’]", after) and before[-1:] not in ("'", "’", "-")
        called = name in names.callables and re.search(r"(?i)\b(class|function|method|def) $", before) is not None
        short = name in ("lst", "arr", "nums", "dic", "xs") and name in names.parameters
        if not (quoted or in_code or telling or letter or called or short):
            return name
        bare = ticks and not quoted and not in_code and before[-1:] not in ("`", ".") and after[:1] not in ("`", "(")
        return f"`{both[name]}`" if bare else both[name]

    return re.sub(r"(?<![\w.])[A-Za-z_]\w*|(?<=\.)[A-Za-z_]\w*(?=\()", swap, text)


def _renamed_task(task: Task, seed: str = "renamed", entry: str = "") -> tuple[Task, _Renaming]:
    """The task under other names, still a right task: its solution passes its tests."""
    names = _renaming(task, f"{seed}/{task.id}", entry)
    other = replace(
        task,
        statement=_rename_prose(task.statement, names),
        code=_rename_code(task.code, names),
        tests=_rename_code(task.tests, names),
        solution=_rename_code(task.solution, names),
    )
    return other, names


# ---------------------------------------------------------------------------------------------------- formatting


def _quotes(code: str, mark: str) -> str:
    """String literals in the other quotes, where nothing has to be escaped for it."""
    edits = []
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (tokenize.TokenError, SyntaxError):
        return code
    for token in tokens:
        if token.type == tokenize.STRING:
            match = re.fullmatch(r"([rRbBuU]*)(['\"])([^'\"\\\n]*)\2", token.string)
            if match and match[2] != mark:
                edits.append((token.start, token.end, f"{match[1]}{mark}{match[3]}{mark}"))
    return _splice(code, edits)


class _Bare(ast.NodeTransformer):
    """Drops docstrings."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            body = [
                part
                for part in node.body
                if not (
                    isinstance(part, ast.Expr)
                    and isinstance(part.value, ast.Constant)
                    and isinstance(part.value.value, str)
                )
            ]
            node.body = body or [ast.Pass()]
        return node


def _reformat(code: str, mark: str = '"') -> str:
    """The program written by another hand: no comments or docstrings, even spacing, one sort of quotes."""
    tree = _parse(code)
    if tree is None:
        return _quotes(re.sub(r"(?m)\s*#.*$", "", code), mark)
    plain = ast.unparse(ast.fix_missing_locations(_Bare().visit(tree)))
    plain = re.sub(r"\n{2,}(?=def |class |async def |@)", "\n\n\n", plain)
    plain = re.sub(r"(?m)\bfor \(([\w, ]+)\) in ", r"for \1 in ", plain)
    return _quotes(plain, mark)


_COMMENTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"for .*:$", ("go through them one at a time", "walk over the data", "look at every candidate")),
    (r"while .*:$", ("keep going until we are done", "repeat as long as needed")),
    (r"if .*:$", ("decide what to do here", "handle this case separately", "only the interesting ones")),
    (r"return\b", ("hand back what we found", "final answer", "done")),
    (r"\w+ = ", ("set things up", "starting point", "keep this for later")),
)


def _comment(code: str, seed: str) -> str:
    """Adds comments of the kind that people write, a few at most."""
    out, used = [], set()
    inside_text = False
    for line in code.split("\n"):
        body = line.strip()
        if not inside_text and body and line[0] in " \t":
            for pattern, notes in _COMMENTS:
                if pattern not in used and re.match(pattern, body):
                    used.add(pattern)
                    out.append(line[: len(line) - len(line.lstrip())] + "# " + _pick(notes, seed, pattern))
                    break
        if line.count('"""') % 2 == 1 or line.count("'''") % 2 == 1:
            inside_text = not inside_text
        out.append(line)
    added = "\n".join(out)
    return added if _parse(code) is None or _parse(added) is not None else code


# ---------------------------------------------------------------------------------------------------- paraphrase

_PHRASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"whether or not\b", ("if",)),
    (r"for example,?", ("as an illustration,", "to give you an idea:", "for instance,")),
    (r"(the )?(total )?(number|count) of times", ("how often",)),
    (r"the number of occurr?ences of", ("how often we see",)),
    (r"(the )?number of", ("the count of", "how many", "the amount of")),
    (r"(the )?frequency of (the )?", ("how frequently one sees the ", "the occurrence counts of the ")),
    (r"greater than or equal to", ("at least", "not below")),
    (r"less than or equal to", ("at most", "not above")),
    (r"greater than", ("above", "bigger than", "exceeding")),
    (r"less than", ("below", "under", "smaller than")),
    (r"more than once", ("repeatedly", "at least twice")),
    (r"such that", ("so that", "in such a way that")),
    (r"according to|based on", ("going by", "with respect to", "depending on")),
    (r"at ?-?least", ("no fewer than", "a minimum of")),
    (r"lambda functions?", ("anonymous functions", "a lambda expression")),
    (r"(heap queue|heapq?)( queue)? algorithm", ("the heapq approach", "a priority queue")),
    (r"(by )?using (the )?regex(es)?", ("with regular expressions", "via a regular expression")),
    (r"(by )?(using|use of) (the )?", ("with the help of ", "by means of ", "through ")),
    (r"list of lists", ("nested list", "list whose entries are lists themselves")),
    (r"lists? of tuples|tuple list", ("collection of tuples", "sequence of tuples")),
    (r"(two|2)[- ]dimensional (list|array)", ("matrix", "grid")),
    (r"lower ?case (letters|characters)", ("small letters", "non-capital letters")),
    (r"upper ?case (letters|characters)", ("capital letters", "capitals")),
    (r"natural numbers", ("positive whole numbers", "counting numbers")),
    (r"positive integers?", ("whole number above zero", "integer > 0")),
    (r"in ascending order", ("from low to high", "smallest one first")),
    (r"in descending order", ("from high to low", "largest one first")),
    (r"in increasing order", ("from low to high", "going upwards")),
    (r"(is|are) (equal|same) to", ("matches", "comes out the same as")),
    (r"equal to", ("the same as", "matching")),
    (r"(starts?|starting) (with|from|at)", ("begins with", "has at its front")),
    (r"(ends?|ending) with", ("finishes on", "closes with")),
    (r"followed by", ("and right after it", "and then")),
    (r"up ?to", ("as far as", "until")),
    (r"(of|in|from|for) the given", (r"\1 the supplied", r"\1 that", r"\1 the passed")),
    (r"(in|from|for|within|of) a given", (r"\1 some", r"\1 any supplied", r"\1 an arbitrary")),
    (r"the given", ("the supplied", "that", "the provided")),
    (r"a given", ("some", "an arbitrary", "any supplied")),
    (r"given", ("supplied", "provided")),
    (r"or not\b", ("",)),
    (r"as an? (argument|input|parameter)", ("as its input", "from the caller")),
    (r"takes? in\b", ("receives", "accepts")),
    (r"(keep|kept) track of", ("remember", "record")),
    (r"should be able to", ("must manage to", "has to")),
    (r"(should|must) (also )?return", ("has to give back", "is expected to yield", "needs to hand back")),
    (r"(which|that) returns", ("giving back", "whose result is", "producing")),
    (r"returns true", ("answers True", "yields True")),
    (r"return true", ("answer with True", "give True")),
    (r"returns? false", ("gives False", "answers with False")),
    (r"you (may|can) assume( that)?", ("it is safe to take for granted that", "you can rely on this:")),
    (r"instead of", ("rather than", "in place of")),
    (r"in addition to", ("besides", "on top of")),
    (r"do(es)? not", ("doesn't", "never")),
    (r"(cannot|can not)", ("is unable to", "can't")),
    (r"there (is|are) no", ("we don't have any", "we find no")),
    (r"there (is|are)", ("we have", "one finds")),
    (r"so that", ("in order that", "with the effect that")),
    (r"in order to", ("so as to", "to")),
    (r"in the (same )?order", ("in the sequence", "arranged the way")),
    (r"the order of", ("the arrangement of", "how we arrange")),
    (r"is not in", ("does not occur inside", "is missing from")),
    (r"each of the", ("every one of the", "all the")),
    (r"one of the", ("any of the", "some one among the")),
    (r"sum of the squares|sum of squares|sum of squared", ("what you get by squaring and adding up",)),
    (r"the sum of", ("the total over", "what you get by adding up")),
    (r"sum of", ("the total over", "what you get by adding up")),
    (r"the product of", ("what you get by multiplying", "the result of multiplying")),
    (r"the (length|size) of", ("how long one finds", "the extent of")),
    (r"the volume of", ("how much space is enclosed by", "the cubic content of")),
    (r"the perimeter of", ("the length around", "the outline length of")),
    (r"((lateral|total) )?surface area of", (r"how much \2 surface belongs to", r"the \2 surface measure of")),
    (r"the area of", ("how much surface is covered by", "the surface measure of")),
    (r"the value of", ("what we get for", "the number behind")),
    (r"the index of|the position of", ("where we find", "the place of")),
    (r"the n['’-]?th", ("number n in the series: the", "the n-th entry among the")),
    (r"(n|t-n|k|m)['’-]?th", ("position-\\1", "\\1-numbered")),
)

# word:other/another, with ~ for a space
_SYNONYM_TEXT = """
    function:routine/helper functions:routines/helpers method:member~function methods:member~functions
    list:sequence/collection lists:sequences/collections array:list/sequence arrays:lists/sequences
    string:text/piece~of~text strings:texts/pieces~of~text element:item/entry/member
    elements:items/entries/members number:value/numeric~value numbers:values/numeric~values
    integer:whole~number/int integers:whole~numbers/ints character:symbol/char characters:symbols/chars
    find:determine/work~out/identify finds:determines/works~out finding:locating check:test/verify
    checks:tests/verifies count:tally/total~up maximum:largest/highest/biggest minimum:smallest/lowest/least
    largest:biggest/greatest/highest smallest:least/lowest longest:lengthiest sum:total/overall~sum
    difference:gap/deviation whether:if all:all~the/every~one~of~the each:every/each~single every:each
    two:a~pair~of/2 three:3/a~trio~of four:4 five:5 first:initial/leading last:final/trailing second:2nd
    third:3rd same:identical/matching equal:identical/the~same different:distinct/unlike distinct:different
    unique:non-repeating common:shared/mutual duplicate:repeated duplicates:repetitions
    remove:drop/strip~out/get~rid~of removes:drops removing:dropping removed:dropped sort:order/arrange
    sorted:ordered/arranged sorting:ordering sorts:arranges convert:turn/transform
    converted:turned/transformed converts:transforms calculate:compute/evaluate calculates:computes
    compute:calculate/evaluate computes:evaluates extract:pull~out/pick~out/select return:give~back/hand~back
    returns:gives~back/yields returned:handed~back get:fetch/obtain print:show/display merge:combine/join
    split:cut/break~up replace:swap/substitute replaces:swaps reverse:flip~around/turn~around
    reversed:turned~around filter:single~out add:put~in/include/attach added:included perform:carry~out/do
    performing:carrying~out generate:produce/build create:build/set~up search:look~for/hunt~for match:fit
    matches:fits/recognises divide:partition/cut~up concatenate:glue~together/join insert:put~in/place
    toggle:flip swap:exchange shift:move/slide contains:holds/includes contain:hold/include containing:holding
    present:found/occurring occur:appear/show~up occurs:appears/shows~up occurrence:appearance
    occurrences:appearances frequency:occurrence~count index:position/slot indices:positions/slots
    positions:indexes/places length:size/extent specified:particular/chosen specific:certain/particular
    possible:conceivable/feasible range:interval/span pairs:couples/two-element~groups
    pair:couple/two-element~group word:term/token words:terms/tokens digit:numeral digits:numerals
    dictionary:dict/mapping dictionaries:dicts/mappings nested:multi-level consecutive:neighbouring/successive
    adjacent:neighbouring/side-by-side decimal:base-10 hexadecimal:base-16 octal:base-8 binary:base-2
    empty:blank required:needed/necessary formed:built/made~up represented:written/expressed
    divisible:evenly~divisible next:following/subsequent previous:preceding/earlier between:lying~between
    other:remaining also:additionally must:has~to/needs~to should:needs~to/is~supposed~to/has~to
    input:incoming~data output:outcome example:sample/illustration examples:samples/illustrations
    ascending:rising descending:falling otherwise:in~any~other~case/if~not represents:stands~for/denotes
    representing:standing~for valid:well-formed/legitimate when:once/as~soon~as new:additional/further
    change:alter/adjust changed:altered modify:alter/adjust edit:rework/revise update:adapt/bring~up~to~date
    updated:adapted fix:repair/correct implement:provide/code~up write:develop/compose class:type
    classes:types called:named/by~the~name~of parameter:argument parameters:arguments argument:parameter
    arguments:parameters currently:at~the~moment/right~now correctly:properly/as~intended
    incorrect:wrong/faulty correct:right/proper ensure:make~sure/see~to~it uses:relies~on/employs
    use:rely~on/employ using:employing used:employed total:overall/combined sequence:series/run
    sequences:series/runs subsequence:partial~sequence substrings:partial~strings
    substring:partial~string/fragment sublist:inner~list sublists:inner~lists item:thing/element
    items:things/elements starting:beginning ending:finishing repeated:recurring appears:occurs/turns~up
    until:up~to~the~point~that without:lacking/leaving~out algorithm:procedure/technique raise:signal/trigger
    throw:raise exception:error exceptions:errors handle:cope~with/deal~with implementation:realisation
    constructor:initializer field:attribute property:attribute result:outcome/answer single:lone/sole
    separated:split~apart/delimited consider:look~at assume:suppose exists:can~be~found exist:can~be~found
    appropriate:fitting/suitable greater:larger larger:bigger bigger:larger smaller:lesser
    original:initial/starting exactly:precisely rule:convention increases:grows starts:begins
    ignore:disregard/skip allows:lets odd:uneven triangle:three-sided~figure which:that within:inside
    having:with perimeter:outline~length maximize:make~as~large~as~possible reach:arrive~at
    elementwise:position~by~position remaining:left-over prevent:avoid inclusive:both~ends~included
    variable:name loop:cycle only:just true:True
"""
_SYNONYMS: dict[str, tuple[str, ...]] = {
    word: tuple(options.split("/")) for word, options in (entry.split(":") for entry in _SYNONYM_TEXT.split())
}


def _keep_case(old: str, new: str) -> str:
    return new[:1].upper() + new[1:] if old[:1].isupper() and not old[1:2].isupper() else new


_PROTECTED = re.compile(
    r"`[^`\n]*`|\"[^\"\n]*\"|(?<!\w)'[^'\n]{1,40}'(?!\w)|https?:\S*|\w+\([^()\n]*\)|\S*[=<>\[\]{}+*/^%_|\d\\]\S*"
    r"|\b[a-z]+[A-Z]\w*|\b[A-Z][a-z]+[A-Z]\w*"
)
_MARK = re.compile("\x01(\\d+)\x02")


def _paraphrase(text: str, seed: str) -> str:
    """Other words for the same thing: phrases first, then single words; names and literals stay."""
    kept: list[str] = []

    def keep(new: str) -> str:
        kept.append(new)
        return f"\x01{len(kept) - 1}\x02"

    text = _PROTECTED.sub(lambda match: keep(match[0]), text)
    for pattern, options in _PHRASES:

        def phrase(match: re.Match[str], options: tuple[str, ...] = options, pattern: str = pattern) -> str:
            return keep(_keep_case(match[0], match.expand(_pick(options, seed, pattern))))

        text = re.sub(rf"(?i)\b(?:{pattern})(?!\w)", phrase, text)

    def word(match: re.Match[str]) -> str:
        options = _SYNONYMS.get(match[0].lower())
        if _hash(f"{seed}/{match[0].lower()}/use") % 100 < 6:
            options = None
        return _keep_case(match[0], _pick(options, seed, match[0].lower()).replace("~", " ")) if options else match[0]

    text = re.sub(r"(?<![\w\x01-])[A-Za-z][A-Za-z']*(?![\w-])", word, text)
    while _MARK.search(text):
        text = _MARK.sub(lambda match: kept[int(match[1])], text)
    return _tidy(text)


def _tidy(text: str) -> str:
    """Small grammar: articles, doubled words and spaces."""
    text = re.sub(r"\b([Aa]) (?=[aeio]\w)(?!(?:one|and|or|of|is|in|if|as|at|on|euler\w*)\b)", r"\1n ", text)
    text = re.sub(r"\b([Aa])n (?=[bcdfghjklmnpqrstvwxyz]\w)(?!hour)", r"\1 ", text)
    text = re.sub(r"(?i)\b(the|of|a|an|to|is|in|total) \1\b", r"\1", text)
    text = re.sub(r"\b[Tt]he (that|any|some|an|a) ", r"\1 ", text)
    text = re.sub(r"\b(a|an|the) a (pair|trio|few) of", r"a \2 of", text)
    text = re.sub(r"(?<=\S) {2,}", " ", text)
    return re.sub(r" +([.,;?])(?=\s|$)", r"\1", text)


def _lower(text: str) -> str:
    return text if re.match(r"[A-Z]{2}|[A-Z]\b|\W", text) else text[:1].lower() + text[1:]


def _upper(text: str) -> str:
    return text if re.match(r"\w*[_(]|\w+[A-Z]", text) else text[:1].upper() + text[1:]


_OPENERS = (
    "Hi! I'm stuck on a small exercise.",
    "Quick Python question.",
    "I could use a hand with the following.",
    "Here is a little puzzle from my course.",
    "You are an experienced Python developer.",
    "Let's practise some coding.",
    "I'm preparing for an interview and came across this one.",
    "We need a small utility for a side project.",
)
_CLOSERS = (
    "Clean, readable code would be appreciated.",
    "Please add short comments to the solution.",
    "Plain Python is enough, nothing has to be installed.",
    "Hand the value back rather than printing it.",
    "Don't worry about invalid arguments.",
    "A brief explanation is welcome but not necessary.",
    "It should cope with larger inputs as well.",
    "Thanks in advance!",
)
_ANSWERS = (
    "Here is one way to do it:",
    "Sure, this does the job:",
    "A straightforward version:",
    "The following code solves the problem.",
    "You could write it like this:",
    "Certainly! Below is the implementation:",
)

_TYPOS = {
    "caluclate": "calculate",
    "occurence": "occurrence",
    "occcurences": "occurrences",
    "substract": "subtract",
    "substaract": "subtract",
    "perfom": "perform",
    "ration": "ratio",
    "arithemetic": "arithmetic",
    "occuring": "occurring",
    "atleast": "at least",
}
_OPENING = re.compile(r"(?i)^.*?write an? (?:python )?function (to |that |for |of )?(.*)$", re.S)


def _frames_mbpp(statement: str, name: str, seed: str) -> str:
    """An MBPP sentence told in another form: a question, a description, a wish; side clauses become sentences."""
    for wrong, right in _TYPOS.items():
        statement = re.sub(rf"\b{wrong}\b", right, statement)
    match = _OPENING.match(statement.strip())
    joint, core = ((match[1] or "").strip(), match[2]) if match else ("to", statement)
    core = re.sub(r"(?i)\b(in|with) python\b", "", core).strip().rstrip(". ")
    parts = re.match(r"(?is)^(.*?)[, ]+((?:by )?(?:using|with the use of) .+|with the help of .+)$", core)
    means = ""
    if parts and joint == "to":
        core, tool = parts[1], re.sub(r"(?i)^(by )?(using|with the use of|with the help of) ", "", parts[2])
        means = _pick(
            ("The solution ought to rely on {}.", "As a tool I'd like to see {}.", "It has to be done through {}."),
            seed,
            "means",
        ).format(_paraphrase(tool, seed))
    setting = ""
    parts = re.match(
        r"(?is)^(\S+ .+?) (in|from|of|for|within) ((?:the|an?|two|three) )?(?:given|specified|supplied) (.+)$", core
    )
    tangled = not parts or re.search(r"[(=]|\b(from|in|by|such|which|that|to|and|with|if|irrespective)\b", parts[4])
    if parts and joint == "to" and len(parts[1].split()) > 2 and not tangled:
        article, noun = (parts[3] or "the ").lower(), _paraphrase(parts[4], seed)
        head = parts[4].split(" of ")[0]
        many = article.strip() in ("two", "three") or re.search(r"^(two|three)\b|[^su]s$", head) is not None
        article = "some " if many and article.strip() in ("the", "") else "a " if article.strip() == "the" else article
        setting = _pick(
            ("Suppose you are handed {}.", "As input there is {}.", "Say we start out with {}.", "Imagine having {}."),
            seed,
            "setting",
        ).format(_tidy(article + noun))
        core = f"{parts[1]} {parts[2]} {'them' if many else 'it'}"
    verb, _, rest = core.partition(" ")
    verb, said = verb.lower(), _paraphrase(rest, seed)
    clause = re.match(r"(?is)^(?:whether|if|that|for) (.*)$", rest)
    moved = re.match(r"(?is)^(.+?) (?:to|into) (.+)$", rest)
    taken = re.match(r"(?is)^(.+) (?:from|in) (.+)$", rest)
    tail = re.match(r"(?is)^(.+?) ((?:in|by|according|based|so|such|with|on|of) .+)$", rest)
    if joint != "to":
        options = [
            "The goal of `{name}`: something " + ("which " if joint == "that" else "for ") + _paraphrase(core, seed),
            "I'd like to have `{name}`, "
            + ("code that " if joint == "that" else "meant for ")
            + _paraphrase(core, seed),
        ]
    elif verb in ("find", "get", "calculate", "compute", "determine", "return", "extract") and not clause:
        options = [
            f"I'm after {said}. Could you implement this as `{{name}}`?",
            f"How would one work out {said}? Package the logic as `{{name}}`",
            f"{said} - that is what `{{name}}` has to come up with",
            f"`{{name}}` takes care of one thing: it delivers {said}",
        ]
    elif verb in ("check", "find", "determine", "verify", "print") and clause:
        said = _paraphrase(re.sub(r"(?i) or not$", "", clause[1]), seed)
        options = [
            f"How can I tell whether {said}? Put the decision into `{{name}}`",
            f"`{{name}}` answers a simple question, namely if {said}",
            f"Is it the case that {said}? That is what `{{name}}` must decide",
        ]
    elif verb == "count":
        said = _paraphrase(re.sub(r"(?i)^(the )?(total )?(number|count) of ", "", rest), seed)
        options = [
            f"`{{name}}` reports a tally of {said}",
            f"What is the total when we tally {said}? Let `{{name}}` figure that out",
            f"I want to know how many we have of the following: {said}. Call the code `{{name}}`",
        ]
    elif verb in ("remove", "delete", "drop") and taken:
        gone, source = _paraphrase(taken[1], seed), _paraphrase(taken[2], seed)
        options = [
            f"{source} should come back without {gone}; that's the job of `{{name}}`",
            f"Starting from {source}, get rid of {gone}. Name it `{{name}}`",
        ]
    elif verb in ("convert", "change", "transform") and moved:
        old, new = _paraphrase(moved[1], seed), _paraphrase(moved[2], seed)
        options = [
            f"`{{name}}` should produce {new} out of {old}",
            f"What I have is {old}, what I want is {new}. Do the translation in `{{name}}`",
        ]
    elif verb in ("sort", "re-arrange", "order") and tail:
        thing, manner = _paraphrase(tail[1], seed), _paraphrase(tail[2], seed)
        options = [
            f"{thing} must be put into order {manner}; do that in `{{name}}`",
            f"Let `{{name}}` arrange things: what comes in is {thing}, what goes out is ordered {manner}",
        ]
    else:
        options = [
            f"The purpose of `{{name}}` is to {_paraphrase(_lower(core), seed)}",
            f"What's needed is some code, `{{name}}`, with which we can {_paraphrase(core, seed)}",
            f"Define `{{name}}` so that it is able to {_paraphrase(core, seed)}",
        ]
    told = _upper(_tidy(_pick(options, seed, "frame").replace("{name}", name)))
    told = told if told.endswith(("?", ".")) else told + "."
    return " ".join(part for part in (setting, told, means) if part)


_RECASTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        r"(?:please )?(?:write|create|implement) a function (?:(?:named|called) )?(?:`?\w+`?(?:\(\))? )?"
        r"(?:that|which) (.+)",
        (r"What we want is code which \1", r"Here's the requirement: it \1"),
    ),
    (
        r"(?:please )?(?:write|create|implement) a function (?:`?\w+`?(?:\(\))? )?to (.+)",
        (r"The aim is to \1", r"What we want is code with which one can \1"),
    ),
    (r"(?:you are|you're|you will be|you'll be) given (.+)", (r"What comes in is \1", r"There will be \1 to work on")),
    (r"given (.+?)[,.] (?:you have to |your task is to )?(return|find|apply|sort|add) (.+)", (r"Take \1 and \2 \3",)),
    (r"given (.+?)[,.] (.+)", (r"Think of \1: \2", r"There is \1 - \2")),
    (r"for (?:a|the|each) given (.+?), (.+)", (r"\2; the thing to work on is some \1",)),
    (r"from an? (?:given|supplied) (.+?), (.+)", (r"\2, where the source is some \1",)),
    (r"input to this function is (.+)", (r"The caller passes \1", r"What comes in is \1")),
    (r"inputs? (?:is|are) (.+)", (r"The caller passes \1", r"What comes in: \1")),
    (r"this function takes (.+?) and returns (.+)", (r"Out comes \2, provided that \1 goes in",)),
    (r"(?:\w+ takes|it takes)(?: in)? (.+)", (r"The argument is \1",)),
    (r"\w+ (?:is a function that|returns) (.+)", (r"The thing to be produced: \1", r"We want: \1")),
    (
        r"(?:it )?returns? (.+?) if (.+?),?\.? (?:and |or )?(?:otherwise|else),?"
        r"(?: it)?(?: should)?(?: returns?)? (.+)",
        (r"In case \2, the answer has to be \1; in all remaining cases \3",),
    ),
    (r"(?:it )?returns? (.+?) if (.+)", (r"When \2, the right answer is \1",)),
    (r"(?:otherwise|else),? (?:it should )?returns? (.+)", (r"\1 is what should come out in the remaining cases",)),
    (r"return (.+)", (r"The outcome has to be \1", r"\1 - that is what should come out")),
    (
        r"if (.+?),? (?:then )?(?:the function )?(?:you )?(?:should )?(?:return|returns) (.+)",
        (r"\2 is expected when \1",),
    ),
    (r"if (.+?), (.+)", (r"\2, provided \1",)),
    (r"(?:in this task, )?your (?:task|job|goal) is to (.+)", (r"The job: \1", r"What has to be done is to \1")),
    (r"you (?:have|need) to (.+)", (r"The job is to \1", r"It is necessary to \1")),
    (r"(?:please )?note(?: that)?:? (.+)", (r"Bear in mind: \1", r"One detail: \1")),
    (r"the function (?:should|will|must) (.+)", (r"The code is required to \1",)),
    (r"filter (.+?) only for ones that (.+)", (r"Of \1, keep just those that \2",)),
    (
        r"(?:add|create|write|implement|define) ((?:a|an|two|the|three) (?:new |helper )?.+)",
        (r"Please extend this with \1", r"What is missing here is \1"),
    ),
    (
        r"(?:change|modify|edit|adapt|revise|update|adjust|refactor) (.+?) (so that|such that|to) (.+)",
        (r"I'd like to see \1 reworked \2 \3", r"Could \1 be altered \2 \3? That is the task"),
    ),
    (r"fix (.+?), (which|that|so) (.+)", (r"Something is broken in \1, \2 \3 - please repair it",)),
    (
        r"(?:fix|correct) (.+?) (to|so that|so|by) (.+)",
        (r"Something is wrong with \1: please repair it \2 \3", r"\1 misbehaves and needs a repair \2 \3"),
    ),
    (r"(?:fix|correct) (.+)", (r"Please repair \1", r"There's a mistake to be repaired: \1")),
    (r"replace (.+?) (?:by|with) (.+)", (r"\2 should take the place of \1",)),
    (r"make sure(?: that)? (.+)|ensure(?: that)? (.+)", (r"It matters that \1\2",)),
)


def _recast(sentence: str, seed: str) -> str:
    """A sentence in another form, with other words."""
    body, end = sentence.rstrip(".:"), sentence[len(sentence.rstrip(".:")) :]
    for number, (pattern, options) in enumerate(_RECASTS):
        match = re.fullmatch(pattern, body, re.I | re.S)
        if match:
            groups = [_lower(group or "") for group in match.groups()]
            template = _pick(options, seed, number)
            told = re.sub(r"\\(\d)", lambda part, groups=groups: _paraphrase(groups[int(part[1]) - 1], seed), template)
            return _upper(_tidy(told)) + end
    return _upper(_paraphrase(sentence, seed))


def _sentences(text: str) -> list[str]:
    """Sentences of running prose; lists, tables and formulas stay lines of their own."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        run: list[str] = []
        for line in [*block.splitlines(), ""]:
            own = re.match(r"\s*([-*@]|\d+[.)]\s|\w+\(.*=)|.*(:=|\|\s{2,}|\s{6,}\S)|\s{4,}", line)
            if line.strip() and not own:
                run.append(line.strip())
                continue
            out += [part for part in re.split(r"(?<=[.!?]) +(?=[A-Z`'\"])", " ".join(run)) if part]
            run = []
            if line.strip():
                out.append("\n" + line.rstrip())
    return out


def _retell(text: str, seed: str) -> str:
    """Running prose told again; a closing remark may move to the front."""
    told = [
        re.sub(r"(\n\s*)(.*)", lambda part: part[1] + _paraphrase(part[2], seed), sentence, flags=re.S)
        if sentence.startswith("\n")
        else _recast(sentence, seed)
        for sentence in _sentences(text)
    ]
    told = [
        part if part.startswith("\n") or part.rstrip().endswith((".", "!", "?", ":")) else part + "." for part in told
    ]
    simple = not any(part.startswith("\n") for part in told)
    if simple and len(told) > 2 and re.match(r"Bear|One detail|It is safe|You can rely", told[-1]):
        told = [told[-1], *told[:-1]]
    return re.sub(r" ?\n ?", "\n", " ".join(told).replace(" \n", "\n")).strip()


# ---------------------------------------------------------------------------------------------------- examples


def _split_example(line: str) -> tuple[str, str] | None:
    """A call and its value from a line of any of the usual notations."""
    match = re.fullmatch(
        r"\s*(?:>>> |\* |assert |for )?(\w+\s*\(.*\))\s*"
        r"(?:==>|=>|➞|->|→|==|=|returns|should return|#\s*returns|#\s*=>)\s*(.+?)\s*",
        line,
    )
    if not match or _parse(match[1]) is None:
        return None
    return match[1], match[2]


def _from_keywords(entry: str, arguments: str, value: str) -> tuple[str, str] | None:
    """An example told by argument names as a call."""
    tree = _parse(f"f({arguments})")
    if tree is None or not isinstance(tree.body[0], ast.Expr) or not isinstance(tree.body[0].value, ast.Call):
        return None
    return f"{entry}({', '.join(ast.unparse(word.value) for word in tree.body[0].value.keywords)})", value.strip()


def _examples(doc: str, entry: str = "f") -> tuple[str, list[tuple[str, str]]]:
    """Splits a docstring into its prose and its examples."""
    prose: list[str] = []
    found: list[tuple[str, str]] = []
    lines = doc.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if re.match(r"\s*\w+\(", line) and line.count("(") > line.count(")"):
            for end in range(at + 1, min(at + 8, len(lines) + 1)):
                joined = " ".join(part.strip() for part in lines[at - 1 : end])
                if _split_example(joined):
                    line, at = joined, end
                    break
        told = re.fullmatch(r"\s*(?:For|Input:) (\w+ = .*?)(?:,? the output should be (.*))?\s*", line)
        if told and not told[2] and at < len(lines) and (out := re.match(r"\s*Output: (.*)", lines[at])):
            told = re.match(r"(?s)(.*)\n(.*)", f"{told[1]}\n{out[1].split(' #')[0]}")
            at += 1
        pair = _from_keywords(entry, told[1], told[2]) if told and told[2] else _split_example(line)
        if pair:
            found.append(pair)
        elif line.strip().startswith(">>>"):
            call, value = line.strip()[3:].strip(), []
            while at < len(lines) and lines[at].strip() and not lines[at].strip().startswith(">>>"):
                value.append(lines[at].strip())
                at += 1
            found.append((call, " ".join(value)))
        elif not re.fullmatch(r"(?i)\s*(for )?(\[input/output\] )?(example|examples|examble|samples)\s*:?\s*", line):
            prose.append(line)
    return "\n".join(prose).strip(), found


def _respell(expression: str, mark: str) -> str:
    """An expression with even spacing and the wanted quotes."""
    try:
        return _quotes(ast.unparse(ast.parse(expression.strip(), mode="eval").body), mark)
    except (SyntaxError, ValueError):
        return expression.strip()


def _argument(call: str) -> str:
    match = re.fullmatch(r"(?s)\w+\s*\((.*)\)", call)
    return match[1] if match else call


_NOTATIONS: tuple[Callable[[str, str], str], ...] = (
    lambda call, value: f"- `{call}` should give `{value}`",
    lambda call, value: f">>> {call}\n{value}",
    lambda call, value: f"For {_argument(call)} the result is {value}.",
    lambda call, value: f"{call}  # -> {value}",
    lambda call, value: f"Input: {_argument(call)}\nOutput: {value}\n",
    lambda call, value: f"* calling {call} yields {value}",
)
_HEADINGS = (
    "Some cases it has to get right:",
    "What calls look like:",
    "Sample behaviour:",
    "To make it concrete:",
    "A few data points:",
)


def _show(pairs: Sequence[tuple[str, str]], seed: str, doctest_before: bool = False) -> str:
    notations = [n for i, n in enumerate(_NOTATIONS) if not (doctest_before and i == 1)]
    notation = _pick(notations, seed, "notation")
    mark = _pick(("'", '"'), seed, "mark")
    shown = [notation(_respell(call, mark), _respell(value, mark)) for call, value in pairs]
    return "\n".join([_pick(_HEADINGS, seed, "heading"), *shown]).strip()


def _test_pairs(tests: Sequence[str]) -> list[tuple[str, str]]:
    """Calls and values from assert statements."""
    pairs = []
    for test in tests:
        tree = _parse(test)
        node = tree.body[0] if tree and tree.body else None
        if not isinstance(node, ast.Assert):
            pairs.append((test.removeprefix("assert").strip(), "True"))
            continue
        check = node.test
        if isinstance(check, ast.Compare) and len(check.ops) == 1 and isinstance(check.ops[0], ast.Eq | ast.Is):
            pairs.append((ast.unparse(check.left), ast.unparse(check.comparators[0])))
        elif isinstance(check, ast.UnaryOp) and isinstance(check.op, ast.Not):
            pairs.append((ast.unparse(check.operand), "False"))
        else:
            pairs.append((ast.unparse(check), "True"))
    return pairs


# ---------------------------------------------------------------------------------------------------- rewritings


def verbatim(task: Task) -> Pair:
    """The task as the benchmark shows it."""
    answer = _fence(task.solution)
    if _kind(task) == "mbpp":
        tests = "\n".join(_asserts(task))
        return f"{task.statement} Your code should pass these tests:\n\n{tests}", answer
    if _kind(task) == "humaneval":
        return task.code, answer
    return f"{_fence(task.code)}\n\n{task.statement}", answer


def renamed(task: Task) -> Pair:
    """The task near its original form under other names, consistently in statement, code, tests and solution."""
    return verbatim(_renamed_task(task)[0])


def reworded(task: Task) -> Pair:
    """The same request in other words and another order; examples stay in another notation, names may change."""
    seed = f"reworded/{task.id}"
    other, names = _renamed_task(task, "reworded")
    if _kind(task) == "canitedit":
        told = _retell(_rename_prose(task.statement, names, ticks=True), seed)
        program = _fence(_rename_code(task.code, names, lambda text: _retold_note(text, names, seed)))
        after = _rename_code(task.solution, names, lambda text: _retold_note(text, names, seed))
        order = _pick((0, 1), seed, "order")
        lead = _pick(("The code in question:", "This is what we have so far:", "Current state:"), seed, "lead")
        instruction = (
            f"{told}\n\n{lead}\n\n{program}" if order else f"{lead}\n\n{program}\n\nHere's the request. {told}"
        )
        return instruction, f"{_pick(_ANSWERS, seed, 'answer')}\n\n{_fence(_comment(after, seed))}"
    answer = f"{_pick(_ANSWERS, seed, 'answer')}\n\n{_fence(_comment(_reformat(other.solution), seed))}"
    if _kind(task) == "mbpp":
        told = _frames_mbpp(task.statement, _entry(other), seed)
        shown = _show(_test_pairs(_asserts(other)), seed)
    else:
        prose, pairs = _examples(task.statement, _entry(task))
        prose = _rename_prose(prose, names, ticks=True)
        pairs = [(_rename_prose(call, names), value) for call, value in pairs]
        told = f"{_retell(prose, seed)} {_signature(other, seed)}"
        shown = _show(pairs, seed, doctest_before=">>>" in task.statement) if pairs else ""
    opener = _pick((*_OPENERS, "", ""), seed, "opener")
    closer = _pick((*_CLOSERS, "", ""), seed, "closer")
    first = f"{opener} {told}".strip()
    if shown and _pick((0, 0, 1), seed, "layout"):
        return f"{opener} {shown}\n\n{told} {closer}".strip(), answer
    return "\n\n".join(part for part in (first, shown, closer) if part), answer


def _retold_note(text: str, names: _Renaming, seed: str) -> str:
    """A comment or docstring in other words, with its margins and its line breaks."""
    return "\n".join(
        line[: len(line) - len(line.lstrip())] + _paraphrase(_rename_prose(line.strip(), names), seed)
        for line in text.split("\n")
    )


def _signature(task: Task, seed: str) -> str:
    """A sentence that names the function, and the helpers that the prompt gives."""
    entry, tree = _entry(task), _parse(task.code)
    head, helpers = f"def {entry}(...)", ""
    if tree:
        parts = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        for node in parts:
            if node.name == entry:
                notes = f" -> {ast.unparse(node.returns)}" if node.returns else ""
                head = f"def {node.name}({ast.unparse(node.args)}){notes}"
        others = [ast.unparse(_Bare().visit(node)) for node in parts if node.name != entry]
        if others:
            helpers = f" This helper already exists:\n\n{_fence(chr(10).join(others))}"
    form = _pick(("Use the header `{}`.", "It has to be called like this: `{}`.", "(Signature: `{}`)"), seed, "head")
    return form.format(head) + helpers


@dataclass(frozen=True)
class _Story:
    """A made-up setting: what it is about, what is wanted, and a name for the code."""

    text: str
    entry: str


_STORIES = tuple(
    _Story(text, entry)
    for text, entry in (
        (
            "Our warehouse scanners send a short record for every crate that passes the gate. The night shift wants "
            "a tool that takes such a record and works out the figure printed on the pallet sheet.",
            "pallet_figure",
        ),
        (
            "I am building a turn-based dungeon game. Whenever the hero opens a chest, the engine has to process the "
            "rune data it finds there and decide what goes onto the screen.",
            "open_chest",
        ),
        (
            "The web server at work writes a compact log. I would like a piece of code that our dashboard can call "
            "on what it has read from the log, so that the operator sees the processed outcome.",
            "digest_log",
        ),
        (
            "A bakery plans its morning deliveries with a spreadsheet export. They asked me to automate the step that "
            "was done by hand so far: feeding the export in and getting back what the drivers need.",
            "plan_deliveries",
        ),
        (
            "In a weather station project the sensor box hands over raw measurements once an hour. Before they are "
            "stored, they go through a small processing stage, which is what I am missing.",
            "process_reading",
        ),
        (
            "Our chess club keeps its tournament bookkeeping in Python. The referee enters the data of a round, and "
            "the program should work out what is put up on the notice board.",
            "notice_board_entry",
        ),
        (
            "A museum is digitising its ticket desk. For the reporting module somebody has to code the processing "
            "step between the ticket data and the monthly overview.",
            "ticket_overview",
        ),
        (
            "I maintain the firmware tools of a model railway. The controller passes settings of the track section "
            "to a script, and the script answers with what the signal box should do.",
            "signal_box_answer",
        ),
        (
            "A gardening app stores what its users plant in each bed. The screen that opens in spring shows something "
            "derived from it, and that derivation is the piece of code I am looking for.",
            "derive_bed_info",
        ),
        (
            "For a radio show we let listeners send in their entries through a form. The producer needs a script that "
            "evaluates an entry on the spot while the show is running.",
            "evaluate_entry",
        ),
        (
            "Our bike rental wants to replace an old macro. It is fed from the booking desk and its outcome is "
            "copied to the service team, so the new code must behave the same way every time.",
            "service_outcome",
        ),
        (
            "A school library would like to modernise its loan system. At the counter the system receives the details "
            "and has to respond at once, so a compact piece of code would be best.",
            "counter_response",
        ),
        (
            "In the observatory the telescope queue is managed by a handful of scripts. One of them got lost when the "
            "disk died: it took the observation details and told the scheduler what came out of them.",
            "queue_outcome",
        ),
        (
            "My card game needs its scoring stage. Players lay down what they hold, the stage is run on it, and the "
            "outcome is announced to the table.",
            "score_table",
        ),
        (
            "The harbour office receives manifests from arriving ships. A clerk used to go through them with pen and "
            "paper; please replace that work with code that can be called from the office software.",
            "read_manifest",
        ),
        (
            "We run a small recycling plant. The conveyor belt computer collects details during the day, and in the "
            "evening they are passed to a routine whose answer ends up in the plant diary.",
            "diary_line",
        ),
    )
)
_STORY_CLOSERS = (
    "It is called with {count} and hands back what it has found.",
    "The software calls it with {count}. Speed is not a concern.",
    "Expect {count}, already cleaned up. Only the code is needed, no user interface.",
    "There will be {count} at each call; nothing is read from disk.",
    "Please stick to a small, self-contained piece of Python ({count}).",
)
_STORY_ANSWERS = (
    ("This should fit into your setup:", "Let me know if the data looks different on your side."),
    ("Here is a compact version for that.", "It can be imported from the rest of the software."),
    ("I would solve it like this:", "You can call it directly with what you receive."),
    ("Something along these lines works:", "I left out logging to keep it short."),
)


def same_solution(task: Task) -> Pair:
    """Another story around the same code: nothing of the request survives, the solution's body does."""
    seed = f"story/{task.id}"
    story: _Story = _pick(_STORIES, seed, "story")
    other, _ = _renamed_task(task, "story", story.entry)
    code = _reformat(other.solution, _pick(('"', '"', "'"), seed, "mark"))
    if _pick((0, 1, 2), seed, "comments") == 0:
        code = _comment(code, seed)
    tree = _parse(other.solution)
    arity = 0
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.FunctionDef) and node.name == _entry(other):
            arity = len(node.args.args)
    count = {0: "the usual data", 1: "a single argument", 2: "two arguments", 3: "three arguments"}.get(
        arity, f"{arity} arguments"
    )
    if not _entry(other):
        closer = "Please show me a complete program, with everything that it needs."
    else:
        closer = _pick(_STORY_CLOSERS, seed, "closer").format(count=count)
    before, after = _pick(_STORY_ANSWERS, seed, "answer")
    return f"{story.text} {closer}", f"{before}\n\n{_fence(code)}\n\n{after}"
