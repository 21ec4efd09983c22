"""The sentence rule: how a request is cut into the pieces that are streamed.

The rule decides every number that is reported, so it has a version (`RULE_VERSION`), and a change of any cut is a new
version. The pieces joined are the text, character for character; no piece is empty; white space *starts* the next
piece, because a tokenizer's seams are stable there (white space at the very end of the text stays with the last
piece). So every streamed prefix is a literal prefix of the text.

The text is read in three passes.

1. Fences. A line that begins with three or more backticks or tildes, after any indent and a list marker, opens a
   fence. Only a line of at least as many of the same character, with nothing but blanks around them, closes it; an
   unclosed fence runs to the end of the text. Backticks inside a line open a fence too where the next run of just as
   many is on a later line; it ends there. No fence is ever cut inside. The words around a fence: what comes before it
   ends a piece; the fence, with the white space and the list marker before it, is one piece; what comes after its
   closing marker starts the next piece.

2. Lines. The rest is read line by line, as prose, list item, code, example or doctest. A blank line always ends a
   block, and so does a change of kind, except that prose goes on a list item. Further:
   - prose: a line break is a cut after a line that ends a sentence or ends in a colon, and before a line that opens
     with a label of up to three words and a colon ("Note:", "Example 1:") or with "for example". Any other line break
     is taken for a wrapped line. "Output:", "Explanation:" and an arrow stay with the line before them.
   - list item: starts at its marker and keeps it.
   - code: lines of code (imports, `def`, assignments, calls, lines that end in `;` or `{`, comments and markdown
     headings, indented lines after code) stay together up to a blank line or a docstring. No cut inside a line. A
     call that is spoken of ("f(x): do this", "f(x) returns") is prose.
   - triple quotes: a docstring starts a block and ends one. Inside it prose is prose, and a line that looks like code
     or like a result (`f(1) == 2`, `f(1) -> 2`) is an example: a piece of its own, with the lines that its open
     brackets need. Outside, a call or a literal with its result is an example too.
   - doctest: a `>>>` line, with what follows up to a blank line, the next `>>>` or the end of the docstring.

3. Sentences. Prose and list items are cut by the `sentencex` library (its English rules, which also know the sentence
   ends of other scripts), a limited window at a time. A cut of its is dropped after "et al." and its like, and where
   a small letter follows a citation or a mark that is spoken of ("a '.' or"); it is moved to before a list marker that
   would be left behind ("Steps: 1. Read it. 2. Stop."). Words in backticks are not cut.

Every cut is at white space, or after a full-width mark outside a number (so "System.out.Println" and "３．５" are
whole). Last, a piece without a letter or digit joins the piece before it (the one after it, if it is the first): the
last sentence is never a lone closing fence or triple quote. An opening fence's info string does not count as words,
nor does a lone tag (`<code>`). A piece that is only a list marker joins the one after it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate

import sentencex

RULE_VERSION = f"1, sentencex {version('sentencex')}"

_WINDOW = 2000  # sentencex takes quadratic time on text without blanks (Chinese, say)
_LOOKAHEAD = 60  # sentencex looks some 30 bytes past a sentence end: nearer to a window's end its cuts can be wrong

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r|\Z)")
_WORD = re.compile(r"[^\W_]")
_FENCE = re.compile(
    r"(?:\A|(?<=[\r\n]))[ \t]*(?:(?:[-*+]|\d{1,3}[.)])[ \t]+)?(?P<line>`{3,}(?=[^`\r\n]*(?:[\r\n]|\Z))|~{3,})"
    r"|(?P<inner>`{3,})"
)
_MARKUP = re.compile(
    r"\s*(?:(?:[-*+]\s+|\d{1,3}[.)]\s+)?(?:`{3,}[^`\r\n]*|~{3,}[^\r\n]*)(?=[\r\n]|\Z)|</?\w[^<>]*>(?=\s*\Z))"
)
_BACKTICKED = re.compile(r"(?<!`)(`{1,9})(?!`)([^`]+)\1(?!`)")

_ITEM = re.compile(r"(?:[-*+•‣◦–]|\(?(?:\d{1,3}|[a-zA-Z])[.)])\s+\S")
_MARKER = re.compile(r"\(?(?:[0-9a-z]{1,3}|[A-Z]|[IVX]+)[.)]+")
_INLINE_MARKER = re.compile(
    r"(?:(?<=[;.!?])\s+\(?(?:\d{1,3}|[a-z])|(?<=:)\s+\(?[01ai]|(?P<lower>\s+\((?:\d{1,3}|[a-z])(?=\))))[.)]+\Z"
)
_LABEL = re.compile(r"[A-Z@][\w@]*(?: \w+){0,2}\s?:(?:\s|\Z)|[Ff]or (?:example\b|instance\b|\w+ ?=)|Examples?\Z")
_TITLE = re.compile(r"(?:For )?[Ee]xamples?(?: \d+)?\Z")
_RESULT_LINE = re.compile(r"[=-]+>|[➞→⇒]|==?\s")
_ANSWER_LINE = re.compile(r"(?:Output|Explanation)\s?:")
_DOCTEST = re.compile(r">>>(?:\s|\Z)")
_QUOTES = re.compile(r"\"\"\"|'''")
_DOCSTRING = re.compile(r"[rRuUbBfF]{0,2}(?:\"\"\"|''')")

_RESULT = re.compile(r"==|=>|->|[➞→⇒]")
_VALUE = re.compile(r"[\w.]+\(|[\[({\"'\d-]")
_CALL = re.compile(r"[A-Za-z_][\w.]*\(.*\)\s*(?:\Z|[-=#!<>~➞→⇒:;]|should\b|returns?\b|will\b|is\b)")
_SPOKEN = re.compile(r"[A-Za-z_][\w.]*\([^()]*\)\s*(?::\s+[a-z]|should\b|returns?\b|will\b|is\b)")
_CALL_BEGINS = re.compile(r"[A-Za-z_][\w.]*\(")
_CODE = re.compile(
    r"import [\w.]+(?: as \w+)?(?:,.*)?\Z|from [\w.]+ import\b"
    r"|(?:async )?def \w+\s*\(|class \w+.*[:{]\Z|@\w[\w.]*(?:\(|\Z)"
    r"|(?:if|elif|while|with|except)\b.*:\Z|for [\w, ()]+ in .*:\Z|(?:else|try|finally)\s*:"
    r"|(?:print|assert)\b\s*(?:\(|.*==)"
    r"|(?:(?:public|private|static|final|const|let|var|int|long|float|double|bool|boolean|char|auto|String)\s+)*"
    r"[\w.\[\]'\"]+(?:\s*,\s*[\w.\[\]]+)*(?:\s*:\s*[\w\[\], .]+)?\s*[-+*/%|&]?=(?![=>])\s*\S"
    r"|#|//|/\*|</?\w[^>]*>\Z|[\])}]+[,;:.)\]}]*\Z"
)
_CODE_MARKS = re.compile(r"[=()}\]]")
_LINE_END = re.compile(r"[.!?…。！？｡．؟।:：][\"'”’)\]」』）*_`]*\Z")
_VARIABLE_END = re.compile(r"(?<=\s)[j-z](?=\.\s+[A-Z])")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|et al|cf|vs|resp|approx|incl|viz)\.\Z", re.IGNORECASE)
_LOOSE_END = re.compile(r"(?:\[[\d\s,–-]+\]|[\s'\"`][.!?]['\"`]?)\Z")  # a citation, or a mark that is spoken of
_CLOSERS = "\"'”’)]」』）】》*_"
_WIDE_ENDS = tuple("。！？｡．؟।॥…")


@dataclass(frozen=True)
class _Line:
    """`text[start:end]` with its line break; `opens` and `closes` tell of a docstring's first and last line.

    `kind`: blank, prose, item, code, example, doctest, output (of a doctest), rest (of what an open bracket began).
    """

    start: int
    end: int
    words: str
    kind: str
    opens: bool
    closes: bool


def split(text: str) -> list[str]:
    """The sentences of `text`: lossless, none empty, [] for "". The rule is this module's docstring."""
    if not text:
        return []
    starts = [0]
    incomplete = True  # the last piece has no words yet, or only a list marker
    for start, end in _raw_pieces(text):
        markup = _MARKUP.match(text, start, end)
        if not _WORD.search(text, markup.end() if markup else start, end):
            continue
        if not incomplete:
            starts.append(start)
        incomplete = _MARKER.fullmatch(text[start:end].strip()) is not None
    if incomplete and len(starts) > 1:
        starts.pop()
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def _raw_pieces(text: str) -> Iterator[tuple[int, int]]:
    """The spans between all cuts, before any joins its neighbour."""
    start = 0
    for cut in _cuts(text):
        if cut > start and _is_seam(text, cut):
            yield start, cut
            start = cut
    yield start, len(text)


def _is_seam(text: str, cut: int) -> bool:
    """Whether white space follows, or a full-width mark that ends a sentence, not inside a number, precedes."""
    if cut == len(text) or text[cut].isspace():
        return cut < len(text)
    mark = text[max(0, cut - 9) : cut].rstrip(_CLOSERS)
    return mark[-1:] in _WIDE_ENDS and not (mark[-2:-1].isdigit() and text[cut].isdigit())


def _cuts(text: str) -> Iterator[int]:
    position = 0
    for start, end in [*_fences(text), (len(text), len(text))]:
        for block_start, block_end, prose in _blocks(text, position, start):
            yield _before_blanks(text, block_start)
            if prose:
                yield from _prose_cuts(text, block_start, block_end)
        yield _before_blanks(text, start)
        yield end
        position = end


def _before_blanks(text: str, position: int) -> int:
    while position and text[position - 1].isspace():
        position -= 1
    return position


def _fences(text: str) -> Iterator[tuple[int, int]]:
    """The spans of the first pass, in order: from a fence's line (or inner marker) to the end of its closing marker."""
    position = 0
    while opening := _FENCE.search(text, position):
        if mark := opening["line"]:
            closing = rf"[\r\n][ \t]*{mark[0]}{{{len(mark)},}}(?=[ \t]*(?:[\r\n]|\Z))"
            close = re.compile(closing).search(text, opening.end())
            position = close.end() if close else len(text)
        else:
            close = re.compile(rf"(?<!`)`{{{len(opening['inner'])}}}(?!`)").search(text, opening.end())
            if not close or text[close.end() : close.end() + 1].isalnum():  # none, or it opens a fence of its own
                position = opening.end()
                continue
            position = close.end()
            if not re.search(r"[\r\n]", text[opening.end() : close.start()]):
                continue
        yield opening.start(), position


def _blocks(text: str, start: int, end: int) -> list[tuple[int, int, bool]]:
    """The second pass over `text[start:end]`, which holds no fence: (start, end, whether it is prose)."""
    blocks: list[tuple[int, int, bool]] = []
    before: _Line | None = None
    for line in _lines(text, start, end):
        if before and _goes_on(before, line):
            first, _, prose = blocks[-1]
            blocks[-1] = (first, line.end, prose)
        elif line.kind != "blank":
            blocks.append((line.start, line.end, line.kind in ("prose", "item")))
        before = line
    return blocks


def _goes_on(before: _Line, line: _Line) -> bool:
    """Whether the break between two lines is no cut."""
    if line.kind == "blank" or before.kind == "blank":
        return False
    if line.kind in ("output", "rest"):
        return True
    if line.opens or before.closes:
        return False
    if before.kind != "code" and (_RESULT_LINE.match(line.words) or _ANSWER_LINE.match(line.words)):
        return True
    if line.kind == "code":
        return before.kind in ("code", "rest")
    if line.kind == "prose" and before.kind in ("prose", "item"):
        return not _ends_sentence(before.words) and not _LABEL.match(line.words)
    return False


def _lines(text: str, start: int, end: int) -> Iterator[_Line]:
    kind, quote, depth, after_code = "blank", "", 0, False
    for match in _LINE.finditer(text, start, end):
        words = match.group().strip()
        opens = not quote and _DOCSTRING.match(words) is not None
        in_docstring = opens or quote != ""
        if not words:
            kind, depth = "blank", 0
        elif in_docstring and (opens or words.startswith(quote)):
            kind, depth = "prose", 0
        elif _DOCTEST.match(words):
            kind, depth = "doctest", 0
        elif kind in ("doctest", "output"):
            kind = "output"
        elif depth > 0 or (kind in ("example", "rest") and _RESULT_LINE.match(words)):
            kind = "rest"
        else:
            kind = _kind(words, in_docstring, after_code and match.group()[0].isspace())
        quote, was = _quote_after(words, quote), quote
        closes = not quote and (opens or was != "")
        if kind in ("code", "example", "rest"):
            depth = max(0, depth + _open_brackets(words))
        if words:
            after_code = closes or kind in ("code", "rest")
        yield _Line(match.start(), match.end(), words, kind, opens, closes)


def _kind(words: str, in_docstring: bool, indented_after_code: bool) -> str:
    """The kind of a line by its own looks."""
    if _ITEM.match(words):
        return "item"
    if indented_after_code and not in_docstring:
        return "code"
    if _LABEL.match(words) or (not in_docstring and _SPOKEN.match(words)):
        return "prose"
    code = _CODE.match(words) or words[-1] == "{" or (words[-1] == ";" and _CODE_MARKS.search(words))
    if not code and _RESULT.search(words) and (in_docstring or _VALUE.match(words)):
        return "example"
    if code or _CALL.match(words) or (_CALL_BEGINS.match(words) and _open_brackets(words) > 0):
        return "example" if in_docstring else "code"
    return "prose"


def _open_brackets(words: str) -> int:
    return sum(words.count(c) for c in "([{") - sum(words.count(c) for c in ")]}")


def _quote_after(words: str, quote: str) -> str:
    """The triple quote that is open after a line, "" for none; `quote` was open before it."""
    for match in _QUOTES.finditer(words):
        if not quote:
            quote = match.group()
        elif quote == match.group():
            quote = ""
    return quote


def _ends_sentence(words: str) -> bool:
    if _ABBREVIATION.search(words[-12:]) or _LOOSE_END.search(words[-40:]):
        return False
    return _LINE_END.search(words[-8:]) is not None or _TITLE.match(words) is not None


def _prose_cuts(text: str, start: int, end: int) -> Iterator[int]:
    """The third pass over a block of prose: the library's cuts, checked and settled."""
    shadow = _shadow(text[start:end])
    position = 0
    while position < len(shadow):
        window = shadow[position : position + _WINDOW]
        trusted = len(window) if position + _WINDOW >= len(shadow) else len(window) - _LOOKAHEAD
        cuts = [cut for cut in _library_cuts(window) if cut <= trusted]
        for cut in cuts:
            settled = _settle(shadow, position + cut)
            if settled:
                yield start + settled
        position += cuts[-1] if cuts else trusted


def _shadow(prose: str) -> str:
    """What the library is shown, as long as `prose`: no words in backticks, no variable's name for an initial, no lone
    surrogate (it has no bytes), and blanks for triple quotes and all white space, because sentencex 1.0.32 panics on
    some white space that is longer than one byte."""
    masked = _BACKTICKED.sub(lambda m: m[1] + "x" * len(m[2]) + m[1], _VARIABLE_END.sub("0", prose))
    return re.sub(r"[\ud800-\udfff]", "x", re.sub(r"\s", " ", _QUOTES.sub("   ", masked)))


def _library_cuts(window: str) -> list[int]:
    """The ends of the library's sentences; none but the window's end where it fails or loses a character."""
    try:
        pieces = sentencex.segment("en", window)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a Rust panic; its class derives from BaseException, unnamed
            raise
        pieces = []
    if "".join(pieces) != window:
        return [len(window)]
    return list(accumulate(len(piece) for piece in pieces))


def _settle(shadow: str, cut: int) -> int | None:
    """Where the library's cut belongs: before the white space, before a list marker, or nowhere."""
    end, following = cut, cut
    while end and shadow[end - 1] == " ":
        end -= 1
    while following < len(shadow) and shadow[following] == " ":
        following += 1
    if not end or following == len(shadow):
        return None
    head, after = shadow[max(0, end - 40) : end], shadow[following]
    if _ABBREVIATION.search(head) or (_LOOSE_END.search(head) and after.islower()):
        return None
    marker = _INLINE_MARKER.search(head)
    if marker and (marker["lower"] is None or after.islower()):
        return end - len(marker.group())
    return end
