import pytest

from trioengine.checkpoint.locate import resolve_model
from trioengine.config.env import cache_dir
from trioengine.core.structured.matchers import MatcherCompiler
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(None, cache_dir=cache_dir()))


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> MatcherCompiler:
    return MatcherCompiler(tokenizer, tokenizer.vocab_size)
