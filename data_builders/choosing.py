"""Second stage: which of the requests that were read are trained on, held out, or dropped as duplicates.

All decisions go by hashes of content and id (`duplicates.rank`) and not by place: the order of a corpus, its pieces and
the number of workers play no part. (Of two rows with one id and the same words in the request the first one stays.)
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_builders import duplicates, reading
from recipes.errors import UserError
from recipes.schema import Data

TRAIN, HELDOUT, REPEATED, EXACT, NEAR, NOT_DRAWN = range(6)
FATES = {
    REPEATED: "same id again",
    EXACT: "exact duplicate",
    NEAR: "near duplicate",
    NOT_DRAWN: "not drawn (data.limit)",
}


@dataclass(frozen=True)
class Choice:
    """One value a request, over all pieces in their order: its fate, and the row that survives for it."""

    fates: NDArray[np.uint8]
    survivors: NDArray[np.int64]
    ranks: NDArray[np.uint64]
    cuts: NDArray[np.uint32]
    corpora: NDArray[np.uint16]
    """Place of the request's corpus in data.corpora."""
    firsts: NDArray[np.int64]
    """Where each piece begins; one more value than there are pieces."""

    def of_piece(self, number: int, fate: int) -> NDArray[np.bool_]:
        """Which requests of a piece have a fate."""
        return self.fates[self.firsts[number] : self.firsts[number + 1]] == fate

    def counts(self, corpus: int) -> Counter[str]:
        """How many requests of a corpus met each fate but training."""
        found = self.fates[self.corpora == corpus]
        named = {**FATES, HELDOUT: "held out"}
        return Counter({name: n for fate, name in named.items() if (n := int((found == fate).sum()))})


def choose(data: Data, folder: Path, corpora: Sequence[int]) -> Choice:
    """Decide. `corpora` has, for each piece that was read into `folder`, its corpus' place in data.corpora.

    Raises UserError where nothing would be left to train on.
    """
    pieces = [reading.keys(folder, number) for number in range(len(corpora))]
    firsts = np.cumsum([0, *map(len, pieces)])
    ranks = _column(pieces, "rank")
    owner = np.repeat(np.array(corpora, dtype=np.uint16), np.diff(firsts))
    fates = np.full(len(ranks), TRAIN, dtype=np.uint8)
    survivors = duplicates.exact(ranks, _column(pieces, "exact"))  # of an id that stands there twice one stays
    fates[survivors != np.arange(len(ranks))] = REPEATED
    if data.duplicates != "keep":
        _drop_duplicates(data, folder, pieces, ranks, fates, survivors)
    for _ in range(3):  # the same id of an exact duplicate of a near one
        survivors = survivors[survivors]
    _hold_out(data.heldout, _column(pieces, "group"), fates)
    for corpus, name in enumerate(data.corpora):
        rows = np.flatnonzero((fates == TRAIN) & (owner == corpus))
        limit = data.limit_of(name)
        if limit is not None and limit < len(rows):
            fates[rows[np.lexsort((rows, ranks[rows]))][limit:]] = NOT_DRAWN
    if not (fates == TRAIN).any():
        raise UserError(f"data: of {len(fates)} requests none is left to train on; see data.heldout and data.limit")
    return Choice(fates, survivors, ranks, _column(pieces, "cuts"), owner, firsts)


def drawn(choice: Choice) -> NDArray[np.int64]:
    """The requests to train on in the order of the draw: by rank."""
    rows = np.flatnonzero(choice.fates == TRAIN)
    return rows[np.lexsort((rows, choice.ranks[rows]))]


def dropped(choice: Choice, folder: Path) -> Iterator[dict[str, Any]]:
    """The duplicates, for review: each with the id of the request that stands for it."""
    names: dict[int, str] = {}
    lost = [np.flatnonzero(choice.fates == fate) for fate in (REPEATED, EXACT, NEAR)]
    rows = np.sort(np.concatenate(lost))
    for wanted in (np.unique(choice.survivors[rows]), rows):
        names |= dict(reading.ids(folder, choice.firsts, wanted))
    for row in rows.tolist():
        yield {
            "id": names[row],
            "dropped": FATES[int(choice.fates[row])],
            "stands_for_it": names[int(choice.survivors[row])],
        }


def _drop_duplicates(
    data: Data,
    folder: Path,
    pieces: Sequence[NDArray[Any]],
    ranks: NDArray[np.uint64],
    fates: NDArray[np.uint8],
    survivors: NDArray[np.int64],
) -> None:
    members = np.flatnonzero(fates == TRAIN)
    same = members[duplicates.exact(_column(pieces, "exact")[members], ranks[members])]
    lost = members[same != members]
    fates[lost], survivors[lost] = EXACT, same[same != members]
    if data.duplicates == "near":
        members = np.flatnonzero(fates == TRAIN)
        texts = reading.Texts(folder, pieces)
        try:
            found = duplicates.near(members, lambda band: _bucket(pieces, band), ranks, texts)
        finally:
            texts.close()
        lost = np.fromiter(found, dtype=np.int64, count=len(found))
        fates[lost] = NEAR
        survivors[lost] = np.fromiter(found.values(), dtype=np.int64, count=len(found))


def _hold_out(heldout: int, groups: NDArray[np.uint64], fates: NDArray[np.uint8]) -> None:
    """Set the groups with the smallest hashes aside. So another group pushes at most one over to the other side."""
    kept = np.unique(groups[fates == TRAIN])
    if heldout and heldout >= len(kept):
        raise UserError(f"data.heldout={heldout}: there are {len(kept)} to take from, set it to 0..{len(kept) - 1}")
    fates[(fates == TRAIN) & np.isin(groups, kept[:heldout])] = HELDOUT


def _column(pieces: Sequence[NDArray[Any]], name: str) -> NDArray[Any]:
    return np.concatenate([piece[name] for piece in pieces])


def _bucket(pieces: Sequence[NDArray[Any]], band: int) -> NDArray[np.uint64]:
    return np.concatenate([piece["buckets"][:, band] for piece in pieces])
