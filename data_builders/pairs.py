"""Prefix-to-answer pairs, in TRL's conversational prompt-completion format with columns of our own, and their card."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_builders.answers import Answered
from data_builders.cuts import Cut
from headstart.request import Request

SHARD_ROWS = 50_000
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SCHEMA = pa.schema(
    [
        ("prompt", _MESSAGES),
        ("completion", _MESSAGES),
        ("id", pa.string()),
        ("source", pa.string()),
        ("kind", pa.string()),
        ("cut_characters", pa.int64()),
        ("cut_sentences", pa.int64()),
        ("sentences", pa.int64()),
        ("answer_source", pa.string()),
    ]
)


def pair(request: Request, cut: Cut, answer: str, system_message: str, answer_source: str) -> dict[str, Any]:
    """One row: the system message, the history and the prefix ask; the answer to the whole request answers."""
    history = [{"role": message.role, "content": message.content} for message in request.history]
    system = {"role": "system", "content": system_message}
    return {
        "prompt": [system, *history, {"role": "user", "content": cut.prefix}],
        "completion": [{"role": "assistant", "content": answer}],
        "id": f"{request.id}#{len(cut.prefix)}",
        "source": request.source,
        "kind": "prefix-to-answer" if len(cut.prefix) < len(request.text) else "whole-request",
        "cut_characters": len(cut.prefix),
        "cut_sentences": cut.sentences,
        "sentences": len(request.sentences),
        "answer_source": answer_source,
    }


def write_pairs(pairs: Iterable[Mapping[str, Any]], folder: Path) -> int:
    """Write `pairs-00000.parquet` and on, SHARD_ROWS rows each; returns the number of rows."""
    count, shard = 0, []
    for row in pairs:
        shard.append(row)
        if len(shard) == SHARD_ROWS:
            _write(shard, folder, count)
            count, shard = count + len(shard), []
    if shard or not count:
        _write(shard, folder, count)
    return count + len(shard)


def write_heldout(requests: Sequence[Request], path: Path) -> None:
    """Requests that are never trained on, as eval's benchmark `heldout` reads them."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            row = {"id": request.id, "sentences": request.sentences, "reference": request.reference}
            file.write(json.dumps({**row, "extra": dict(request.extra)}, ensure_ascii=False) + "\n")


def write_dropped(answers: Sequence[Answered], folder: Path) -> dict[str, int]:
    """Keep what was dropped for review, one file a reason; returns the count of each reason."""
    folder.mkdir(exist_ok=True)
    counts = Counter(answered.dropped for answered in answers if answered.dropped)
    for reason in counts:
        rows = [{"id": a.id, "answer": a.text} for a in answers if a.dropped == reason]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{reason.replace(' ', '-')}.jsonl").write_text(text)
    return {str(reason): count for reason, count in sorted(counts.items(), key=str)}


def card(manifest: Mapping[str, Any]) -> str:
    """The dataset card, with the header that the hub reads."""
    counts = "\n".join(f"| {name} | {value} |" for name, value in manifest["counts"].items())
    return f"""---
license: {manifest["corpus"]["licence"].lower()}
configs:
- config_name: default
  data_files: pairs-*.parquet
---

# Prefix-to-answer pairs ({manifest["corpus"]["name"]})

Built by headstart: each row asks for the answer to a request of which only a prefix is shown. `prompt` and
`completion` are TRL's conversational prompt-completion format; the other columns say where the row comes from.

| count | |
| --- | --- |
{counts}

- cuts: {manifest["cuts"]["kind"]}, up to {manifest["cuts"]["per_request"]} a request, seed {manifest["seed"]};
  whole requests {"also" if manifest["cuts"]["whole_requests"] else "not"} trained on
- answers: {manifest["answers"]["source"]}
- held out, never trained on: `heldout.jsonl`; dropped rows by reason: `dropped/`
- sentence rule {manifest["sentence_rule"]}, renderer {manifest["renderer"]}
"""


def _write(rows: Sequence[Mapping[str, Any]], folder: Path, begin: int) -> None:
    path = folder / f"pairs-{begin // SHARD_ROWS:05d}.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), path, compression="zstd")
