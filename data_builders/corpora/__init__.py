"""The corpora that requests come from, one module each."""

from types import ModuleType

from data_builders.corpora import everyday, evol_codealpaca, jsonl, lmsys, magicoder, mbpp, seed
from recipes.errors import UserError

MODULES = {module.NAME: module for module in (lmsys, mbpp, magicoder, evol_codealpaca, seed, everyday)}
INCLUDED = (seed, everyday)  # their rows come with headstart
OWN = (".jsonl", ".jsonl.gz", ".parquet")


def shown(name: str) -> str:
    """A corpus' name without the folder of a file of one's own: for what is passed on."""
    return name.rpartition("/")[2] if module(name) is jsonl else name


def stem(name: str) -> str:
    """A corpus' name without folder and ending: what the ids of its requests begin with."""
    return next((shown(name).removesuffix(ending) for ending in OWN if name.endswith(ending)), name)


def module(name: str) -> ModuleType:
    """The module behind a name of data.corpora. Raises UserError for a name that is none."""
    if name.endswith(OWN):
        return jsonl
    if name in MODULES:
        return MODULES[name]
    raise UserError(f"data.corpora: no corpus {name!r}; there are {', '.join(MODULES)}, or a file of your own")
