"""The sections: defaults, checks that name the option, and the way to another process and back."""

import math

import attrs
import pytest

from trioengine.config import EngineConfig, ServerConfig
from trioengine.config.engine import Quantization
from trioengine.config.options import from_dict, options_of, to_dict
from trioengine.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", 3),
        ("model", "a\0b"),
        ("served_model_name", ""),
        ("quantization", "int3"),
        ("quantization", 8),
        ("max_model_len", 1),
        ("max_model_len", "2048"),
        ("block_size", 0),
        ("block_size", None),
        ("kv_cache_memory_bytes", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_seqs", 2.0),
        ("max_num_batched_tokens", -1),
        ("cpu_threads", 0),
        ("step_timeout_s", 0),
        ("step_timeout_s", math.nan),
        ("startup_timeout_s", math.inf),
        ("core_stop_timeout_s", -1),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_the_name_of_its_option(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(EngineConfig, {name: value})
    assert caught.value.option == name
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("port", 65536), ("port", -1), ("host", ""), ("strict", "yes"), ("strict", 1)]
)
def test_the_server_refuses_by_name_too(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(ServerConfig, {name: value})
    assert caught.value.option == name


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(EngineConfig, {"max_model_length": 3})
    assert caught.value.option == "max_model_length"


@pytest.mark.parametrize(
    "section",
    [
        EngineConfig(model="some/model", max_num_seqs=3, step_timeout_s=2, quantization=Quantization.INT8),
        ServerConfig(port=0, strict=True),
    ],
)
def test_a_section_comes_back_from_plain_data_as_it_was(section: EngineConfig | ServerConfig) -> None:
    values = to_dict(section)
    assert all(value is None or type(value) in (str, int, float, bool) for value in values.values())
    assert from_dict(type(section), values) == section


def test_a_section_is_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        EngineConfig().max_num_seqs = 3  # type: ignore[misc]


def test_options_tell_type_and_default_of_each_field() -> None:
    options = {option.name: option for option in options_of(EngineConfig)}
    assert list(options) == [field.name for field in attrs.fields(EngineConfig)]
    assert (options["max_model_len"].kind, options["max_model_len"].default) == (int, None)
    assert (options["step_timeout_s"].kind, options["step_timeout_s"].default) == (float, 120.0)
    assert (options["model"].kind, options["model"].default) == (str, None)
    assert (options["quantization"].kind, options["quantization"].choices) == (str, ["int8", "int4"])


def test_a_choice_may_be_named_by_its_text() -> None:
    assert from_dict(EngineConfig, {"quantization": "int4"}) == EngineConfig(quantization=Quantization.INT4)
