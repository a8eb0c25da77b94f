"""The sections: defaults, checks that name the option, and the way to another process and back."""

import json
import math

import attrs
import pytest

from trioengine.config import EngineConfig, ServerConfig
from trioengine.config.engine import (
    DType,
    KVCacheDType,
    LogprobsMode,
    Quantization,
    ReasoningParser,
    SchedulingPolicy,
    SpeculationConfig,
    SpeculationMethod,
)
from trioengine.config.options import from_dict, options_of
from trioengine.errors import ConfigError
from trioengine.types.codec import make_strict_converter

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", 3),
        ("model", "a\0b"),
        ("served_model_name", ""),
        ("quantization", "int3"),
        ("quantization", 8),
        ("device", "tpu"),
        ("device", None),
        ("dtype", "float64"),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("attention_backend", "XFORMERS"),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", True),
        ("enforce_eager", "yes"),
        ("deterministic", 1),
        ("cudagraph_capture_sizes", 0),
        ("cudagraph_capture_sizes", [1, 0]),
        ("cudagraph_capture_sizes", [1, True]),
        ("cudagraph_capture_sizes", "[1, 2"),
        ("cudagraph_capture_sizes", None),
        ("max_model_len", 1),
        ("max_model_len", "2048"),
        ("block_size", 0),
        ("block_size", None),
        ("kv_cache_memory_bytes", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_seqs", 2.0),
        ("max_num_batched_tokens", -1),
        ("max_num_batched_tokens", 10**14),
        ("kv_cache_memory_bytes", 2**63),
        ("cpu_threads", 0),
        ("step_timeout_s", 0),
        ("step_timeout_s", math.nan),
        ("startup_timeout_s", math.inf),
        ("core_stop_timeout_s", -1),
        ("scheduling_policy", "lifo"),
        ("max_num_partial_prefills", 0),
        ("long_prefill_token_threshold", -1),
        ("async_scheduling", 1),
        ("enable_prefix_caching", None),
        ("kv_offload_bytes", 0),
        ("enable_lora", "yes"),
        ("max_loras", 0),
        ("max_lora_rank", 0),
        ("max_lora_rank", 513),
        ("max_cpu_loras", 0),
        ("kv_offload_path", "/without/a/size"),
        ("max_logprobs", -2),
        ("logprobs_mode", "raw_logits"),
        ("reasoning_parser", "unknown"),
        ("speculative_config", ""),
        ("speculative_config", "{"),
        ("speculative_config", "[]"),
        ("speculative_config", 3),
        ("speculative_config", {}),
        ("speculative_config", {"method": "ngram"}),
        ("speculative_config", NGRAM | {"method": "eagle"}),
        ("speculative_config", NGRAM | {"num_speculative_tokens": 0}),
        ("speculative_config", NGRAM | {"unknown": 1}),
        ("speculative_config", NGRAM | {"model": "some.gguf"}),
        ("speculative_config", NGRAM | {"method": "draft_model"}),
        ("speculative_config", NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_the_name_of_its_option(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(EngineConfig, {name: value})
    assert caught.value.option == name
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("port", 65536), ("port", -1), ("fd", 2**31), ("host", ""), ("strict", "yes"), ("strict", 1)]
)
def test_the_server_refuses_by_name_too(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(ServerConfig, {name: value})
    assert caught.value.option == name


def test_fewer_adapters_in_memory_than_in_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_cpu_loras \(3\) is less than max_loras \(4\)") as caught:
        EngineConfig(max_loras=4, max_cpu_loras=3)
    assert caught.value.option == "max_cpu_loras"
    assert EngineConfig(max_loras=4, max_cpu_loras=4).max_cpu_loras == 4


def test_a_rank_is_one_of_the_cores_where_their_number_is_given() -> None:
    with pytest.raises(ConfigError, match=r"data_parallel_rank \(2\).* data_parallel_size \(2\)") as caught:
        EngineConfig(data_parallel_size=2, data_parallel_rank=2)
    assert caught.value.option == "data_parallel_rank"
    assert EngineConfig(data_parallel_size=2, data_parallel_rank=1).local_ranks == (1,)
    assert EngineConfig(data_parallel_rank=5).local_ranks == (5,)


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(EngineConfig, {"max_model_length": 3})
    assert caught.value.option == "max_model_length"


@pytest.mark.parametrize(
    "section",
    [
        EngineConfig(),
        EngineConfig(
            model="some/model",
            max_num_seqs=3,
            step_timeout_s=2,
            quantization=Quantization.INT8,
            kv_cache_dtype=KVCacheDType.FP8,
            cudagraph_capture_sizes=(1, 2, 4),
            scheduling_policy=SchedulingPolicy.PRIORITY,
            async_scheduling=False,
            enable_prefix_caching=False,
            kv_offload_bytes=1 << 30,
            kv_offload_path="/some/folder",
            speculative_config=SpeculationConfig(
                method=SpeculationMethod.DRAFT_MODEL, num_speculative_tokens=3, model="small"
            ),
            logprobs_mode=LogprobsMode.PROCESSED_LOGPROBS,
            reasoning_parser=ReasoningParser.QWEN3,
        ),
        ServerConfig(port=0, strict=True),
    ],
)
def test_a_section_comes_back_from_plain_data_as_it_was(section: EngineConfig | ServerConfig) -> None:
    """On its way to a core process."""
    converter = make_strict_converter(forbid_extra_keys=True)
    plain = json.loads(json.dumps(converter.unstructure(section)))
    assert converter.structure(plain, type(section)) == section


def test_a_section_is_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        EngineConfig().max_num_seqs = 3  # type: ignore[misc]


def test_options_tell_type_and_default_of_each_field() -> None:
    options = {option.name: option for option in options_of(EngineConfig)}
    assert list(options) == [field.name for field in attrs.fields(EngineConfig)]
    assert (options["max_model_len"].kind, options["max_model_len"].default) == (int, None)
    assert (options["step_timeout_s"].kind, options["step_timeout_s"].default) == (float, 120.0)
    assert (options["model"].kind, options["model"].default) == (str, None)
    assert (options["quantization"].kind, options["quantization"].choices) == (str, ["int8", "int4", "fp8"])
    sizes = options["cudagraph_capture_sizes"]
    assert (sizes.kind, sizes.is_list, sizes.default) == (int, True, ())
    assert (options["async_scheduling"].kind, options["async_scheduling"].default) == (bool, None)
    assert options["speculative_config"].is_section


def test_a_choice_may_be_named_by_its_text() -> None:
    assert from_dict(EngineConfig, {"quantization": "int4"}) == EngineConfig(quantization=Quantization.INT4)


@pytest.mark.parametrize("value", [(1, 2), [1, 2], "[1, 2]"])
def test_a_list_of_numbers_may_be_json(value: object) -> None:
    assert from_dict(EngineConfig, {"cudagraph_capture_sizes": value}) == EngineConfig(cudagraph_capture_sizes=(1, 2))
    assert EngineConfig(cudagraph_capture_sizes=3).cudagraph_capture_sizes == (3,)  # type: ignore[arg-type]


def test_types_of_numbers_have_vllms_names() -> None:
    assert {dtype: dtype.plain for dtype in DType} == {
        DType.AUTO: DType.AUTO,
        DType.HALF: DType.FLOAT16,
        DType.FLOAT16: DType.FLOAT16,
        DType.BFLOAT16: DType.BFLOAT16,
        DType.FLOAT: DType.FLOAT32,
        DType.FLOAT32: DType.FLOAT32,
    }
    assert [dtype for dtype in KVCacheDType if dtype.is_fp8] == [KVCacheDType.FP8, KVCacheDType.FP8_E4M3]


@pytest.mark.parametrize("value", [NGRAM, json.dumps(NGRAM)], ids=["mapping", "text"])
def test_a_section_in_a_section_is_a_mapping_or_json(value: object) -> None:
    expected = SpeculationConfig(method=SpeculationMethod.NGRAM, num_speculative_tokens=4)
    assert from_dict(EngineConfig, {"speculative_config": value}) == EngineConfig(speculative_config=expected)


def test_an_error_in_an_inner_section_names_both_options() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config: num_speculative_tokens is required"):
        from_dict(EngineConfig, {"speculative_config": {"method": "ngram"}})
