"""The manifest's numbers in words: the dataset card, with the header that the hub reads."""

from collections.abc import Mapping
from typing import Any


def card(manifest: Mapping[str, Any]) -> str:
    """README.md of a data folder."""
    corpora = manifest["corpora"]
    licences = {corpus["licence"] for corpus in corpora.values()}
    counts = "\n".join(
        f"| {name} | {reason} | {number:,} |"
        for name, corpus in corpora.items()
        for reason, number in corpus["counts"].items()
    )
    totals = "\n".join(f"| all | {name} | {number:,} |" for name, number in manifest["counts"].items())
    terms = "\n".join(f"- {name}: {corpus['terms']}" for name, corpus in corpora.items())
    clean = manifest["disjoint_from"]
    tasks = ", ".join(f"{name} ({found['tasks']:,} tasks)" for name, found in clean["benchmarks"].items()) or "none"
    cuts = ", ".join(f"{share:.0%} {kind}" for kind, share in manifest["cuts"]["shares"].items() if share)
    return f"""---
license: {licences.pop() if len(licences) == 1 else "other"}
configs:
- config_name: default
  data_files: pairs-*.parquet
---

# {manifest["kind"].capitalize()} pairs ({", ".join(corpora)})

Built by headstart: each row asks for the answer to a request of which only a prefix is shown. `prompt` and
`completion` are TRL's conversational prompt-completion format; the other columns say where the row comes from, what
was held back (`rest`) and, in draft-refinement pairs, which draft is to be repaired (`draft`, never part of `prompt`).

| corpus | count | |
| --- | --- | --- |
{counts}
{totals}

- cuts: {cuts}; up to {manifest["cuts"]["per_request"]} a request, seed {manifest["seed"]}; whole requests
  {"also" if manifest["cuts"]["whole_requests"] else "not"} trained on
- answers: {manifest["answers"]}
- looked for tasks of: {tasks}; {clean["rows_removed"]:,} of {clean["rows_checked"]:,} requests removed
- control strings: {manifest["counts"]["pairs that hold a control string"]:,} pairs hold one of the model's template as
  text; headstart's trainer reads it as text, a trainer that goes by the template reads it as control
- duplicates: {manifest["duplicates"]}
- held out, never trained on: `heldout.jsonl`; dropped rows by reason: `dropped/`
- sentence rule {manifest["sentence_rule"]}, renderer {manifest["renderer"]}

## Licences and terms of the corpora

{terms}
"""
