from pathlib import Path

import pytest

from trioengine.checkpoint.locate import ModelLocation, resolve_model
from trioengine.config.env import cache_dir
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def default_model() -> ModelLocation:
    return resolve_model(None, cache_dir=cache_dir())


@pytest.fixture(scope="session")
def tokenizer(default_model: ModelLocation) -> Tokenizer:
    return load_tokenizer(default_model)


@pytest.fixture(scope="session")
def fixtures_folder() -> Path:
    return Path(__file__).parents[2] / "fixtures"
