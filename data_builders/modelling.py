"""The model behind a build: who answers, who scores, and the cache between them and a killed run."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from data_builders.answers import Backend, Cache, InProcess
from data_builders.making import Maker, ModelMaker
from data_builders.server import Server
from headstart import model as loading
from headstart.batch import BatchDecoder
from headstart.family import stop_ids
from headstart.likelihood import mean_log_likelihoods
from headstart.prompt import Renderer
from recipes.run_folder import digest
from recipes.schema import Recipe

CACHE = "answers.jsonl"  # in the run's folder: it serves a build with other cuts too


@contextmanager
def model_maker(recipe: Recipe, maker: Maker, rendering: Renderer, run_dir: Path) -> Iterator[ModelMaker]:
    """A maker with the recipe's model: behind `data.server`, or in this process.

    Raises UserError where the server or the model cannot be had.
    """
    data = recipe.data
    answering = data.answers == "self" or data.kind == "draft-refinement"
    here = (answering and data.server is None) or data.max_surprise is not None
    model = loading.load_model(recipe.model) if here else None
    weights = loading.weights_hash(recipe.model)
    backend: Backend | None = None
    if data.server is not None and answering:
        name = f"{recipe.model.name}@{recipe.model.revision or 'main'}"
        served = data.server_model or recipe.model.name
        backend = Server(data.server, rendering, data.max_new_tokens, name, served, data.in_flight)
    elif answering:
        stops = stop_ids(loading.family(recipe.model), rendering.tokenizer, model)
        print(f"end tokens: {', '.join(rendering.tokenizer.convert_ids_to_tokens(sorted(stops)))}")
        backend = InProcess(BatchDecoder(model, stops, data.max_new_tokens, data.batch_size), rendering, weights)
    scored = partial(mean_log_likelihoods, model, batch_size=data.batch_size) if data.max_surprise else None
    with Cache(run_dir / CACHE) as cache:
        yield ModelMaker(maker, backend, cache, rendering, scored, digest([weights, recipe.model.dtype]))
