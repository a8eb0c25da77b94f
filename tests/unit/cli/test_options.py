"""Options are made from the sections, and only what was given reaches them."""

import argparse

import pytest

from trioengine.cli import serve
from trioengine.cli.options import add_engine_options, add_section, engine_config_from, flag_of, section_from
from trioengine.cli.parser import CommandParser
from trioengine.cli.vllm_options import tell_ignored
from trioengine.config import EngineConfig, ServerConfig
from trioengine.config.engine import SpeculationConfig, SpeculationMethod
from trioengine.config.options import options_of
from trioengine.errors import ConfigError


def parse(*words: str) -> argparse.Namespace:
    parser = CommandParser()
    add_engine_options(parser)
    add_section(parser, ServerConfig, "server")
    return parser.parse(words)


def test_nothing_given_is_every_default() -> None:
    assert engine_config_from(parse()) == EngineConfig()
    assert section_from(parse(), ServerConfig) == ServerConfig()


def test_given_values_arrive_with_their_types() -> None:
    arguments = parse("--max-num-seqs", "3", "--step-timeout-s", "1.5", "--strict", "--host", "::1")
    assert engine_config_from(arguments) == EngineConfig(max_num_seqs=3, step_timeout_s=1.5)
    assert section_from(arguments, ServerConfig) == ServerConfig(host="::1", strict=True)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8192", 8192),
        ("8k", 8000),
        ("1K", 1024),
        ("1M", 2**20),
        ("1.5K", 1536),
        ("2m", 2_000_000),
        ("25.6k", 25_600),
        ("auto", None),
    ],
)
def test_integers_are_written_as_people_write_them(text: str, number: int | None) -> None:
    config = engine_config_from(parse("--max-model-len", text, "--max-num-batched-tokens", text))
    assert config == EngineConfig(max_model_len=number, max_num_batched_tokens=number)


@pytest.mark.parametrize(
    "text",
    ["", "k", "8q", "1.5", "0.0001k", "1.0001K", "9" * 5000 + "k", "nank", "infk", "1e99999999k", "8 k K", "automatic"],
)
def test_what_is_no_integer_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--max-model-len", text)
    assert f"{text[:50]!r} is no integer" in capsys.readouterr().err


def test_a_value_that_has_a_fixed_default_is_not_left_open(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--max-num-seqs", "auto")
    assert "'auto' is no integer" in capsys.readouterr().err


def test_minus_1_is_the_models_own_context_as_in_vllm() -> None:
    assert engine_config_from(parse("--max-model-len", "-1")) == EngineConfig()


def test_what_may_be_on_or_off_has_a_flag_for_both() -> None:
    assert not engine_config_from(parse("--no-enable-prefix-caching")).enable_prefix_caching
    assert engine_config_from(parse("--enable-prefix-caching")) == EngineConfig()
    assert engine_config_from(parse("--async-scheduling")).async_scheduling is True
    assert engine_config_from(parse("--no-async-scheduling")).async_scheduling is False


def test_a_section_in_a_section_is_json() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4}'
    speculation = SpeculationConfig(method=SpeculationMethod.NGRAM, num_speculative_tokens=4)
    assert engine_config_from(parse("--speculative-config", text)) == EngineConfig(speculative_config=speculation)


@pytest.mark.parametrize(
    "words",
    [
        ["--allowed-hosts", "a.example", "--allowed-hosts", "[::1]"],
        ["--allowed-hosts", '["a.example", "[::1]"]'],
        ["--allowed-hosts", '["a.example"]', "--allowed-hosts", "[::1]"],
    ],
)
def test_a_list_is_an_option_several_times_or_json(words: list[str]) -> None:
    assert section_from(parse(*words), ServerConfig) == ServerConfig(allowed_hosts=("a.example", "[::1]"))


def test_a_list_of_numbers_is_one_argument_after_another() -> None:
    config = EngineConfig(model="some.gguf", cudagraph_capture_sizes=(1, 2, 8))
    assert engine_config_from(parse("some.gguf", "--cudagraph-capture-sizes", "1", "2", "8")) == config
    words = ["--cudagraph-capture-sizes", "1", "2", "--cudagraph-capture-sizes", "8", "--", "some.gguf"]
    assert engine_config_from(parse(*words)) == config


@pytest.mark.parametrize("value", ['["a.example", 3]', '[["a"]]', "a/b"])
def test_members_that_cannot_work_are_an_error_of_the_list(value: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        section_from(parse("--allowed-hosts", value), ServerConfig)


def test_a_model_after_a_list_is_no_member_of_it() -> None:
    arguments = parse("--api-key", "secret", "some.gguf")
    assert section_from(arguments, ServerConfig).api_key == ("secret",)
    assert engine_config_from(arguments).model == "some.gguf"


def test_the_model_is_an_argument_or_an_option() -> None:
    assert engine_config_from(parse("some.gguf")).model == "some.gguf"
    assert engine_config_from(parse("--model", "some.gguf")).model == "some.gguf"


def test_a_value_that_cannot_work_is_an_error_of_its_option() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        engine_config_from(parse("--max-num-seqs", "0"))


def parse_serve(*words: str) -> argparse.Namespace:
    parser = CommandParser(prog="trioengine serve")
    serve.add_arguments(parser)
    return parser.parse(words)


def test_a_command_of_vllms_works_and_says_what_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    words = "served/model --port 9000 --host ::1 --api-key k --dtype auto -tp 1 --gpu-memory-utilization 0.9"
    words += " --max-model-len 4096 --max-num-seqs 8 --enforce-eager --trust-remote-code --enable-auto-tool-choice"
    words += " --tool-call-parser hermes --reasoning-parser qwen3 --disable-log-requests --uvicorn-log-level warning"
    words += " --served-model-name mine --enable-prefix-caching --disable-uvicorn-access-log --swap-space 4"
    words += " -q int8 --cuda-graph-sizes 1 2 -O3 --disable-cascade-attn --max-cudagraph-capture-size 8"
    arguments = parse_serve(*words.split())
    engine = engine_config_from(arguments)
    assert (engine.model, engine.served_model_name, engine.max_num_seqs) == ("served/model", "mine", 8)
    assert (engine.dtype, engine.gpu_memory_utilization, engine.enforce_eager) == ("auto", 0.9, True)
    assert (engine.quantization, engine.cudagraph_capture_sizes) == ("int8", (1, 2))
    server = section_from(arguments, ServerConfig)
    assert (server.port, server.host, server.api_key, server.access_log) == (9000, "::1", ("k",), False)
    with caplog.at_level("INFO"):
        tell_ignored(arguments)
    [record] = caplog.records
    for flag in ("--tensor-parallel-size 1", "--trust-remote-code", "--compilation-config 3", "--disable-cascade-attn"):
        assert flag in record.message
    assert "--max-num-seqs" not in record.message


def test_short_names_of_vllm_are_ours() -> None:
    assert engine_config_from(parse_serve("-dp", "2")) == EngineConfig(data_parallel_size=2)
    assert engine_config_from(parse_serve("-dp", "2", "-dpn", "1")).local_ranks == (1,)
    assert engine_config_from(parse_serve("-dp=2", "-dpl", "2")).local_ranks == (0, 1)


def test_what_cannot_be_switched_off_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    words = ["--no-enable-chunked-prefill", "--no-trust-remote-code", "--stream-interval", "4"]
    with caplog.at_level("INFO"):
        tell_ignored(parse_serve(*words))
    warning, ignored = caplog.records
    assert warning.levelname == "WARNING"
    assert warning.message.endswith("always on here, so that these options have no effect: --no-enable-chunked-prefill")
    assert ignored.message.endswith(": --no-trust-remote-code, --stream-interval 4")


@pytest.mark.parametrize(
    "words", [["folder/", "--tokenizer", "folder"], ["a.gguf", "--tokenizer", "org/a"], ["--model=m", "--tokenizer=m"]]
)
def test_the_models_own_tokenizer_may_be_named(words: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        tell_ignored(parse_serve(*words))
    assert "--tokenizer" in caplog.text


@pytest.mark.parametrize("words", [["folder", "--tokenizer", "other"], ["--tokenizer", "other"]])
def test_another_tokenizer_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="leave out --tokenizer"):
        tell_ignored(parse_serve(*words))


def test_a_command_without_them_says_nothing_about_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        tell_ignored(parse_serve("--port", "1"))
    assert not caplog.records


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-modle-len", "8"], "unrecognized option --max-modle-len (did you mean --max-model-len?). "),
        (["--max-modle-len=8"], "unrecognized option --max-modle-len (did you mean --max-model-len?). "),
        (["some.gguf", "--nothing-like-it", "8"], "unrecognized option --nothing-like-it. "),
        (["some.gguf", "more"], "unrecognized argument 'more'. "),
        (["--port", "many"], "argument --port: 'many' is no integer, such as 8192, 8k (8000) or 8K (8192). "),
        (["--port"], "argument --port: expected one argument. "),
    ],
)
def test_a_wrong_command_line_is_one_line_that_says_what_was_meant(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_serve(*words)
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told == f"trioengine serve: error: {message}All options: trioengine serve --help\n"


def test_underscores_in_names_are_hyphens() -> None:
    words = ["--max_num_seqs=3", "--step_timeout_s", "1.5", "--served_model_name", "my_model", "--", "my_folder"]
    config = EngineConfig(model="my_folder", served_model_name="my_model", max_num_seqs=3, step_timeout_s=1.5)
    assert engine_config_from(parse(*words)) == config
    template = "--a_b {{ x }}"  # A value for argparse, as it has a space.
    assert section_from(parse("--chat_template", template), ServerConfig).chat_template == template


@pytest.mark.parametrize("model", [["some.gguf"], ["--model", "some.gguf"]])
def test_behind_the_model_a_list_has_one_value_after_another(model: list[str]) -> None:
    words = "--served-model-name a b c --api-key=k l --lora-modules x=1 y=2 --port 1 --model-alias d --api-key m"
    arguments = parse(*model, *words.split())
    assert engine_config_from(arguments) == EngineConfig(model="some.gguf", served_model_name="a")
    assert section_from(arguments, ServerConfig) == ServerConfig(
        port=1, model_alias=("b", "c", "d"), api_key=("k", "l", "m"), lora_modules=("x=1", "y=2")
    )


def test_a_model_behind_several_values_is_none_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parse("--api-key", "k", "l", "--port", "1", "some.gguf")
    assert engine_config_from(arguments).model == "some.gguf"
    assert section_from(arguments, ServerConfig).api_key == ("k", "l")
    with pytest.raises(SystemExit):
        parse("--api-key", "k", "l", "some.gguf")
    assert "MODEL must stand before" in capsys.readouterr().err


def test_two_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'some.gguf', and 'other.gguf' by --model"):
        engine_config_from(parse("some.gguf", "--model", "other.gguf"))
    assert engine_config_from(parse("some.gguf", "--model", "some.gguf")).model == "some.gguf"


def test_no_two_sections_share_an_option() -> None:
    flags = [flag_of(option.name) for section in (EngineConfig, ServerConfig) for option in options_of(section)]
    assert len(flags) == len(set(flags))


def test_help_texts_format(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    for section in (EngineConfig, ServerConfig):
        for option in options_of(section):
            assert flag_of(option.name) in shown
