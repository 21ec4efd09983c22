"""A text's words, as duplicates and leaks are looked for: what a reader would call the same reads the same here."""

import re
import unicodedata

_NO_BLANKS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(r"[^\W_]+")
_WORD_OR_SIGN = re.compile(rf"[{_NO_BLANKS}]|(?:(?![{_NO_BLANKS}])[^\W_])+")
_MARKS = ".,;:!?'\"()\u2018-\u201f\u3001\u3002\uff0c\uff01\uff1f"  # of sentences
_SIGN = re.compile(rf"[{_NO_BLANKS}]|(?:(?![{_NO_BLANKS}])[^\W_])+|[^\w\s{_MARKS}]")


def signs(text: str) -> list[str]:
    """As `words`, with every sign that is no mark of a sentence as a word of its own: "C++" is not "C"."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return _SIGN.findall(text.casefold())


def words(text: str) -> list[str]:
    """Runs of letters and digits, case folded, in compatibility form; in scripts without blanks each sign is a word.

    Punctuation, white space and underscores part words and are no part of any.
    """
    if text.isascii():
        return _WORD.findall(text.lower())
    return _WORD_OR_SIGN.findall(unicodedata.normalize("NFKC", text).casefold())
