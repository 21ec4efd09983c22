"""Duplicates among requests, exact and near: one survivor a cluster, whatever order the corpus has.

Exact: the same words and signs in the history and the final turn; letter case, white space and the marks of sentences
make no difference. Near: candidates by MinHash (64 permutations over runs of three words, 16 bands of 4:
two requests that share 70% of their runs meet in 99% of the cases), each then compared as it stands by `alike`. What
two requests have word for word in common, a preface say, does not make them alike: their differing sentences must be
alike too, and their signs the same ("C" is not "C++"). In a bucket of more than some thousand requests, all behind one
preface, only so many are compared with each other (LEADERS, COMPARED). Clusters are what is connected; the survivor is
the one with the smallest rank, a hash of its id.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray
from rensa import RMinHash

from data_builders.words import signs
from headstart.request import Request

PERMUTATIONS, BANDS = 64, 16
VERSION = f"1, rensa {RMinHash.ALGORITHM_VERSION}"
RUN = 3  # words in a run
WHOLE = 0.7  # least share of runs in common (Jaccard)
REST = 0.7  # least share of words in common in what differs
EXTRA = 0.05  # most share of words that one has more than the other, where the other has nothing in their place
LEADERS, COMPARED = (
    32,
    200_000,
)  # least requests of a bucket that the others are compared with; comparisons meant for it
REMEMBERED = 2_000_000  # pairs known to differ

Keys = NDArray[np.uint64]


def normal(request: Request) -> str:
    """The request's words and signs, one sentence (or turn of the history) a line: what is compared."""
    parts = [*(message.content for message in request.history), *request.sentences]
    return "\n".join([" ".join(signs(part)) for part in parts])


def exact_key(text: str) -> int:
    """The hash of a `normal` text that exact duplicates share."""
    return xxhash.xxh3_64_intdigest(text.replace("\n", " ").encode())


def rank(request_id: str, seed: int) -> int:
    """Decides who survives, and who is drawn where only some are: no matter where in the corpus it stands."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{request_id}".encode("utf-8", "surrogatepass")).digest()[:8], "big")


def bands(text: str) -> Keys:
    """A `normal` text's bucket in each band, shape (BANDS,)."""
    found = text.split()
    runs = [" ".join(found[i : i + RUN]) for i in range(max(1, len(found) - RUN + 1))]
    sketch = RMinHash(num_perm=PERMUTATIONS, seed=1)
    sketch.update(runs)
    buckets = np.zeros(BANDS, dtype=np.uint64)
    for column in np.array(sketch.digest(), dtype=np.uint64).reshape(BANDS, -1).T:
        buckets = (buckets ^ column) * np.uint64(0x9E3779B97F4A7C15)
        buckets ^= buckets >> np.uint64(29)
    return buckets


def alike(left: str, right: str) -> bool:
    """Whether two `normal` texts are near duplicates."""
    ours, theirs = left.split("\n"), right.split("\n")
    common = set(ours) & set(theirs)
    only_left = Counter(" ".join(line for line in ours if line not in common).split())
    only_right = Counter(" ".join(line for line in theirs if line not in common).split())
    if only_left and only_right:
        if (only_left & only_right).total() < REST * (only_left | only_right).total():
            return False
    elif (only_left | only_right).total() > max(2, EXTRA * len(left.split())):
        return False
    if any(not token.isalnum() for token in (only_left - only_right) + (only_right - only_left)):
        return False
    a, b = _runs(left.split()), _runs(right.split())
    return len(a & b) >= WHOLE * len(a | b)


def exact(keys: Keys, ranks: Keys) -> NDArray[np.int64]:
    """For each row the row that survives for it: the one of its key with the smallest rank, the first of equals."""
    order = np.lexsort((np.arange(len(keys)), ranks, keys))
    starts = np.flatnonzero(np.diff(keys[order], prepend=keys[order][:1] + np.uint64(1)))
    sizes = np.diff(starts, append=len(order))
    survivors = np.empty(len(keys), dtype=np.int64)
    survivors[order] = np.repeat(order[starts], sizes)
    return survivors


def near(
    members: NDArray[np.int64], band: Callable[[int], Keys], ranks: Keys, text: Callable[[int], str]
) -> dict[int, int]:
    """Near duplicates among the rows `members`: each dropped row with the row that survives for it.

    `band(i)` gives all rows' buckets in band i, `text(row)` a row's `normal` text. Buckets are gone through by rank, so
    the order of the rows plays no part.
    """
    parent: dict[int, int] = {}

    def root(row: int) -> int:
        while (above := parent.get(row, row)) != row:
            parent[row] = parent.get(above, above)
            row = above
        return row

    different: set[tuple[int, int]] = set()
    for i in range(BANDS):
        for bucket in _buckets(members, band(i)[members], ranks):
            leaders: list[int] = []
            most = max(LEADERS, COMPARED // len(bucket))
            for row in bucket:
                for leader in leaders:
                    a, b = sorted((root(leader), root(row)), key=lambda at: (int(ranks[at]), at))
                    if a == b:
                        break
                    if (leader, row) not in different and alike(text(leader), text(row)):
                        parent[b] = a
                        break
                    if len(different) < REMEMBERED:
                        different.add((leader, row))
                else:
                    if len(leaders) < most:
                        leaders.append(row)
    return {row: found for row in list(parent) if (found := root(row)) != row}


def _buckets(members: NDArray[np.int64], keys: Keys, ranks: Keys) -> Iterator[list[int]]:
    """Rows of one key, for each key of several, by rank."""
    order = np.lexsort((members, ranks[members], keys))
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    starts, ends = np.append(0, edges), np.append(edges, len(order))
    for begin, end in zip(starts[ends - starts > 1], ends[ends - starts > 1], strict=True):
        yield members[order[begin:end]].tolist()


def _runs(found: Sequence[str]) -> set[tuple[str, ...]]:
    return set(zip(*(found[i:] for i in range(RUN)), strict=False)) if len(found) >= RUN else {tuple(found)}
