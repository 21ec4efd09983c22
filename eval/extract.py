"""The program to test, made from a chat model's free-form answer. Text is only read here, never executed.

The rule, in this order:
1. the last fenced block that defines the entry point (a correction wins; a summary or a usage example does not);
2. the last fenced block that continues the prompt as the function's body;
3. outside of fences, the stretches of code up to the last one that defines the entry point;
4. outside of fences, an indented body that continues the prompt.
A definition goes behind the prompt's own imports and helpers, a body behind the whole prompt. A fenced block is taken
as it stands; an answer that was cut, or that has prose around it, loses whole top-level statements only. Indentation
stays, but for three moves that keep the lines' relation: a fence's own indent is taken off its lines; a block that is
indented as a whole and holds the definition goes to the left; a body written flush left, known by its `return`, goes
under the prompt's signature.
"""

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<before>.*?)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")
_CODE = re.compile(r"(?:def|class|import|from|async)\s|@\w")
_LANGUAGE = re.compile(r"(?:python3?|py)\s+(?=(?:def|class|import|from|async)\s|@\w)")
_FUTURE = re.compile(r"^from __future__ import .*\n", re.MULTILINE)
_DEEPEST = 100  # levels of a tree; `ast.dump` and `ast.unparse` recurse several frames a level


@dataclass(frozen=True)
class Extraction:
    """`code` is the whole program; or it is None and `note` is "extraction"."""

    code: str | None
    note: str | None


@dataclass(frozen=True)
class Block:
    """A fenced block's lines. `closed` is False when the answer ended first."""

    text: str
    closed: bool


def extract(answer: str, prompt: str, entry_point: str) -> Extraction:
    """The program in `answer`. `prompt` is the code to complete (imports, helpers, signature, docstring), or code
    that has to stand in front of the answer, or ""."""
    answer, prompt = answer.replace("\r\n", "\n"), prompt.replace("\r\n", "\n")
    lead = preamble(prompt, entry_point)
    blocks, prose = split_blocks(answer)
    definitions = [text for block in blocks if defines(text := _definition(block, entry_point), entry_point)]
    if definitions:
        return Extraction(_behind(lead, definitions[-1]), None)
    bodies = [_continued(prompt, block.text, entry_point, cut=not block.closed) for block in blocks]
    bodies = [body for body in bodies if body]
    if bodies:
        return Extraction(bodies[-1], None)
    stretches = _stretches(prose)
    while stretches and not defines(stretches[-1], entry_point):
        stretches.pop()
    if stretches:
        return Extraction(_behind(lead, "\n".join(stretches)), None)
    body = _continued(prompt, _indented(prose), entry_point, cut=True)
    return Extraction(body, None) if body else Extraction(None, "extraction")


def preamble(prompt: str, entry_point: str) -> str:
    """What stands before the entry point's definition in `prompt`; all of it when there is no definition."""
    head = re.search(rf"(?:^@.*\n)*^(?:async )?def {re.escape(entry_point)}\b", prompt, re.MULTILINE)
    return prompt[: head.start()] if head else prompt


def defines(text: str, entry_point: str) -> bool:
    """Whether `text` defines the name at its top level; code that does not parse is judged by its `def` line."""
    tree = _parse(text)
    if isinstance(tree, ast.Module):
        return entry_point in {name for node in tree.body for name in _names(node)}
    return re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", text, re.MULTILINE) is not None


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


# --- fences ---


def split_blocks(answer: str) -> tuple[list[Block], str]:
    """The fenced blocks in order, and the text outside of them."""
    lines, blocks, prose = answer.split("\n"), list[Block](), list[str]()
    at = 0
    while at < len(lines):
        opening = _opening(lines[at])
        if opening is None:
            prose.append(lines[at])
            at += 1
            continue
        prose.append(opening["before"])
        block, at = _block(lines, at + 1, opening)
        inner = split_blocks(block.text)[0] if not isinstance(_parse(block.text), ast.Module) else []
        blocks += inner or [block]  # a longer fence around fences
    return blocks, "\n".join(prose)


def _opening(line: str) -> re.Match[str] | None:
    """A fence that opens a block. Behind text on the same line it must name Python, else it is a stray mark."""
    found = _FENCE.match(line)
    if found and found["before"] and not re.match(r"(?:python3?|py)\b", found["info"]):
        return None
    return found


def _block(lines: list[str], at: int, opening: re.Match[str]) -> tuple[Block, int]:
    """The block whose first line is `at`, and the line to go on with.

    It ends at a fence of the same kind that is not indented more than 3 deeper (so not at one in a docstring), at
    such a fence glued to the end of a line, or where the next block with a language opens.
    """
    width, fence = len(opening["indent"]), opening["fence"]
    info = _LANGUAGE.sub("", opening["info"].strip())
    content = [info] if _CODE.match(info) else []
    while at < len(lines):
        line = lines[at]
        mark = _FENCE.match(line)
        if mark and mark["fence"].startswith(fence):
            depth, named = len(mark["indent"]), bool(mark["info"].strip())
            if mark["before"] and not named:
                return Block("\n".join([*content, _outdent(mark["indent"] + mark["before"], width)]), True), at + 1
            if not mark["before"] and not named and depth <= width + 3:
                return Block("\n".join(content), True), at + 1
            if not mark["before"] and named and depth <= width:
                return Block("\n".join(content), True), at
        content.append(_outdent(line, width))
        at += 1
    return Block("\n".join(content), False), at


def _outdent(line: str, width: int) -> str:
    own = len(line) - len(line.lstrip(" "))
    return line[min(own, width) :]


# --- code ---


def parsed(code: str) -> ast.Module | None:
    """The tree of a Python text, without its warnings; None where it is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _parse(text: str) -> ast.Module | int:
    """The tree, or the number of the line (from 1) at which parsing failed: 1 for a tree that is too deep to walk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            return error.lineno or 1 << 30
        except ValueError:
            return 1 << 30
        except (RecursionError, MemoryError):
            return 1
    return tree if _walkable(tree) else 1


def _walkable(tree: ast.Module) -> bool:
    """A model that repeats itself writes `1 + 1 + 1 + ...`, whose tree is as deep as the text is long."""
    level: list[ast.AST] = [tree]
    for _ in range(_DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return not level


def _head(text: str) -> str:
    """The longest run of whole top-level statements at the start of `text`; "" when there is none."""
    lines = text.split("\n")
    while lines and isinstance(fault := _parse("\n".join(lines)), int):
        cut = min(fault, len(lines)) - 1
        while cut > 0 and not lines[cut][:1].strip():
            cut -= 1
        lines = lines[:cut]
    return "\n".join(lines)


def _definition(block: Block, entry_point: str) -> str:
    """The block's text, made ready to stand at the top level; a cut block without its unfinished end."""
    text = block.text
    if text[:1].isspace() and not defines(text, entry_point):
        text = textwrap.dedent(text)
    head = text if block.closed else _head(text)
    return head if defines(head, entry_point) else text


def _behind(lead: str, code: str) -> str:
    """`lead`, then `code`; `from __future__` lines go to the top, where the language wants them."""
    whole = f"{lead.rstrip()}\n\n\n{code}\n" if lead.strip() else f"{code}\n"
    futures = _FUTURE.findall(whole)
    return "".join(futures) + _FUTURE.sub("", whole) if futures else whole


def _continued(prompt: str, body: str, entry_point: str, cut: bool) -> str | None:
    """Prompt and body as one program, if that makes the entry point's function longer; else None."""
    stub = _function(prompt, entry_point)
    if stub is None or not body.strip():
        return None
    if not body.lstrip("\n")[:1].isspace():
        tree = _parse(body)
        if not isinstance(tree, ast.Module) or not any(_returns(node) for node in tree.body):
            return None
        body = textwrap.indent(body, " " * stub.body[0].col_offset)
    whole = prompt + ("" if prompt.endswith("\n") else "\n") + body + "\n"
    whole = _head(whole) if cut else whole
    function = _function(whole, entry_point)
    return whole if function and len(function.body) > len(stub.body) else None


def _function(code: str, entry_point: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    tree = _parse(code)
    for node in reversed(tree.body) if isinstance(tree, ast.Module) else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == entry_point:
            return node
    return None


def _returns(node: ast.AST) -> bool:
    """Whether a return or yield of this level is in `node`; those of nested functions do not count."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    return isinstance(node, ast.Return | ast.Yield) or any(map(_returns, ast.iter_child_nodes(node)))


def _stretches(prose: str) -> list[str]:
    """Runs of top-level code in text, each begun by a definition or an import."""
    lines, found, at = prose.split("\n"), list[str](), 0
    while at < len(lines):
        head = _statements("\n".join(lines[at:])) if _CODE.match(lines[at]) else ""
        if head:
            found.append(head)
        at += head.count("\n") + 1
    return found


def _statements(text: str) -> str:
    """`_head`, ended also at prose that happens to parse: a lone word, or a word with a colon."""
    head = _head(text)
    tree = _parse(head)
    for node in tree.body if isinstance(tree, ast.Module) else ():
        lone = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call | ast.Constant)
        if lone or (isinstance(node, ast.AnnAssign) and node.value is None):
            return "\n".join(head.split("\n")[: node.lineno - 1])
    return head


def _indented(prose: str) -> str:
    """The text from its first indented line on, where that line begins a paragraph or follows a colon."""
    lines = prose.split("\n")
    for at, line in enumerate(lines):
        if line.strip() and line[:1].isspace():
            before = lines[at - 1].strip() if at else ""
            return "\n".join(lines[at:]) if not before or before.endswith(":") else ""
    return ""
