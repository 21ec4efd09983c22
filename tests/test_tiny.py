"""model.tiny: a tiny random model of the family's architecture with its real tokenizer."""

import pytest
from conftest import tokenizer_folder
from transformers import Gemma3ForConditionalGeneration

from headstart import model as loading
from headstart.batch import BatchDecoder
from headstart.family import FAMILIES, stop_ids
from headstart.prompt import renderer
from headstart.tiny import tiny_folder
from recipes.schema import Model
from train.adapter import adapted_modules

TASKS = ("a poem", "code", "x", "many words", "letters", "numbers 1 2 3", "hello world", "the end", "yes", "a list")


def settings(family, **changes):
    name = "embedded" if family == "smollm2" else str(tokenizer_folder(family))
    return Model(name=name, family=family, dtype="float32", device="cpu", tiny=True, **changes)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """One cache for all tests of this file, apart from the user's."""
    real = loading.embedded_folder()
    monkeypatch.setattr(loading, "embedded_folder", lambda: real)
    folder = tmp_path_factory.getbasetemp() / "tiny-cache"
    loading._tiny.cache_clear()
    monkeypatch.setattr("headstart.tiny.platformdirs.user_cache_dir", lambda name: str(folder))
    yield
    loading._tiny.cache_clear()


def test_a_tiny_model_answers_and_ends_by_itself(family):
    given = settings(family)
    model, tokenizer = loading.load_model(given), loading.load_tokenizer(given)
    rendering = renderer(tokenizer, FAMILIES[family])
    decoder = BatchDecoder(model, stop_ids(FAMILIES[family], tokenizer, model), 32, 10)
    answers = [found.answer for found in decoder.advance([rendering.prompt(f"Write {task}. Now.") for task in TASKS])]
    written = [rendering.text(answer.written) for answer in answers if answer.stop == "end"]
    assert sum(bool(text.strip()) for text in written) >= 3
    assert len(set(written)) >= 3
    assert model.num_parameters() < 40e6
    assert len(adapted_modules(model, FAMILIES[family])) == 4 * model.config.get_text_config().num_hidden_layers


def test_it_is_of_the_family_with_its_real_tokenizer(family):
    given = settings(family)
    model = loading.load_model(given)
    assert model.config.model_type == FAMILIES[family].model_types[0]
    real = loading.load_tokenizer(given.model_copy(update={"tiny": False}))
    assert (
        renderer(loading.load_tokenizer(given), FAMILIES[family]).fingerprint
        == renderer(real, FAMILIES[family]).fingerprint
    )
    if family == "gemma3":
        assert isinstance(model, Gemma3ForConditionalGeneration)
        assert "vision_config" in loading.load_config(given).to_dict()


def test_it_is_the_same_whenever_it_is_made(monkeypatch, tmp_path):
    given = settings("qwen3")
    first = loading.weights_hash(given)
    monkeypatch.setattr("headstart.tiny.platformdirs.user_cache_dir", lambda name: str(tmp_path))
    loading._tiny.cache_clear()
    assert loading.weights_hash(given) == first
    again = tiny_folder(loading.load_tokenizer(given.model_copy(update={"tiny": False})), FAMILIES["qwen3"])
    assert again.parent == tmp_path
