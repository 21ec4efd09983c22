"""Build training pairs: a prefix of a request asks, the answer to the whole request answers.

    python data_builders/build.py recipe=smollm2
    python data_builders/build.py recipe=qwen3 data.paths.lmsys=PATH
    python data_builders/build.py recipe=smollm2 --preview 3

Writes <run>/data: pairs-*.parquet, heldout.jsonl (never trained on), manifest.json, README.md, dropped/. `--preview N`
draws N of its pairs: prefix, held-back rest, and the supervised tokens in colour.
"""

import sys

from recipes.loader import Invocation, run_script


def main(argv: list[str] | None = None) -> int:
    return run_script(__doc__, argv, build, flags={"--preview": 3})


def build(invocation: Invocation) -> None:
    from data_builders import (
        work,  # with torch, which the processes that it starts, and that read this file, do without
    )

    work.build(invocation)


if __name__ == "__main__":
    sys.exit(main())
