"""Native objects as JSON come back as they were, and what is none is refused with its place."""

import json
from typing import Any

import attrs
import numpy as np
import pytest

from trioengine.errors import (
    CodecError,
    EngineGenerateError,
    PromptTooLongError,
    RequestError,
    TrioEngineError,
    UnavailableError,
)
from trioengine.types.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Call,
    CollectiveRPC,
    CoreLoad,
    GetKVCacheEvents,
    GetLoad,
    IsPaused,
    KVCacheEvents,
    ListLoRAs,
    LoRAInfo,
    PauseGeneration,
    PauseMode,
    Sleep,
    UpdateWeights,
    WeightTensor,
)
from trioengine.types.native_json import (
    call_from_json,
    call_to_json,
    dumps,
    error_from_json,
    error_to_json,
    from_json,
    output_from_json,
    output_to_json,
    pooling_from_json,
    pooling_to_json,
    reply_from_json,
    reply_to_json,
    to_json,
)
from trioengine.types.output import CompletionOutput, FinishReason, Logprob, PositionLogprobs, RequestOutput
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.pooling import EncodeRequest, PoolingOutput, PoolingParams, TextPairPrompt
from trioengine.types.request import ChatPrompt, Deadlines, GenerateRequest, KVHints
from trioengine.types.structured import StructuredOutputsParams

POSITION = PositionLogprobs(Logprob(1, -1.5, 2, b"\xff"), (Logprob(3, -0.5, 1, b"x"),))


def through_json(value: object) -> Any:
    return json.loads(dumps(value))


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest("é"),
        GenerateRequest(ChatPrompt([{"role": "user", "content": [{"type": "text", "text": None}]}])),
        GenerateRequest(
            [1, 2],
            SamplingParams(
                logit_bias={5: 1.0},
                stop=["x", "y"],
                seed=2**63,
                n=2,
                output_kind=RequestOutputKind.DELTA,
                structured_outputs=StructuredOutputsParams(json={"type": "object"}),
                extra_args={"a": [1]},
            ),
            request_id="mine",
            deadlines=Deadlines(total_s=0.2),
            kv_hints=KVHints(read_prefix_cache=False),
            tokenization_kwargs={"add_special_tokens": True},
            trace_headers={"traceparent": "00"},
        ),
        EncodeRequest(TextPairPrompt("a", "b"), PoolingParams(task="score")),
        EncodeRequest([1]),
    ],
    ids=["text", "chat", "everything", "pair", "tokens"],
)
def test_requests_come_back_as_they_were(request_: GenerateRequest | EncodeRequest) -> None:
    assert from_json(through_json(to_json(request_)), type(request_)) == request_


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "prompt"),
        ({"prompt": "text"}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": {"text": 3}}, "prompt.text"),
        ({"prompt": {"first": "a", "second": "b"}}, "prompt"),
        ({"prompt": {"token_ids": ["1"]}}, "prompt.token_ids"),
        ({"prompt": {"text": "a"}, "promt": 1}, "promt"),
        ({"prompt": {"text": "a"}, "sampling": {"temperature": "1"}}, "sampling.temperature"),
        ({"prompt": {"text": "a"}, "sampling": {"n": True}}, "sampling.n"),
        ({"prompt": {"text": "a"}, "sampling": {"logit_bias": {"x": 1}}}, "sampling.logit_bias"),
        ({"prompt": {"text": "a"}, "sampling": []}, "sampling"),
    ],
)
def test_what_is_no_request_is_refused_with_its_place(body: Any, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        from_json(body, GenerateRequest)
    assert place in str(caught.value)


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        (GetLoad(), CoreLoad(1, 2, 3, 4)),
        (ListLoRAs(), (LoRAInfo("a", "b", True),)),
        (Sleep(2, PauseMode.KEEP), None),
        (PauseGeneration(), None),
        (IsPaused(), True),
        (CollectiveRPC("method", '{"a": 1}'), ("1", "2")),
        (UpdateWeights((WeightTensor("w", "float32", (1,), b"\0\1\2\3"),)), None),
        (
            GetKVCacheEvents(3),
            KVCacheEvents(3, 0, (BlockStored(0, b"a", b"b", b"c"), BlockRemoved(1, b"d"), AllBlocksCleared())),
        ),
    ],
)
def test_operations_and_their_replies_come_back_as_they_were(call: Call[Any], reply: object) -> None:
    assert call_from_json(through_json(call_to_json(call))) == call
    assert reply_from_json(call, through_json(reply_to_json(call, reply))) == reply


@pytest.mark.parametrize(
    "body",
    [{}, {"name": "Nothing"}, {"name": 3}, {"name": "Sleep", "fields": {"level": "2"}}, {"name": "Sleep", "x": 1}],
)
def test_what_is_no_operation_is_refused(body: Any) -> None:
    with pytest.raises(RequestError):
        call_from_json(body)


def test_a_reply_of_another_type_is_an_error() -> None:
    with pytest.raises(CodecError):
        reply_from_json(GetLoad(), {"running": "1"})


@pytest.mark.parametrize(
    "output",
    [
        RequestOutput("r", (1, 2), (CompletionOutput(0, 'a"\n', (7,)),), False, 1),
        RequestOutput("r", (1, 2), (CompletionOutput(0, "", (), FinishReason.STOP, "x"),), True, 1, 2),
        RequestOutput("r", (1, 2), (CompletionOutput(1, "é", (7,), logprobs=(POSITION,)),), False, 1),
        RequestOutput("r", (1, 2), (), False, 1, 0, (None, POSITION), "version"),
    ],
)
def test_outputs_come_back_as_they_were(output: RequestOutput) -> None:
    assert output_from_json(json.loads(output_to_json(output)), "r", (1, 2)) == output
    assert output_from_json(json.loads(output_to_json(output, with_prompt=True)), "r", ()) == output
    assert "prompt_token_ids" not in json.loads(output_to_json(output))


def test_vectors_come_back_as_they_were() -> None:
    data = np.array([[1.5, -2.25]], dtype=np.float32)
    again = pooling_from_json(json.loads(pooling_to_json(PoolingOutput("r", (1, 2), data, 1))))
    assert (again.request_id, again.prompt_token_ids, again.num_cached_tokens) == ("r", (1, 2), 1)
    assert np.array_equal(again.data, data)
    assert not again.data.flags.writeable


@pytest.mark.parametrize("value", [{}, [], {"outputs": 3}, {"outputs": [{}], "finished": True}])
def test_what_is_no_output_is_an_error(value: Any) -> None:
    for read in (lambda: output_from_json(value, "r", ()), lambda: pooling_from_json(value)):
        with pytest.raises(CodecError):
            read()


@pytest.mark.parametrize(
    "error",
    [
        RequestError("wrong", param="n"),
        PromptTooLongError(num_prompt_tokens=9, max_model_len=8),
        UnavailableError("full", retry_after_s=2.5),
    ],
)
def test_errors_come_back_as_they_were(error: TrioEngineError) -> None:
    again = error_from_json(through_json(error_to_json(error)), "unused")
    assert type(again) is type(error)
    assert attrs.asdict(again) == attrs.asdict(error)


def test_an_error_of_the_engines_has_its_class_and_the_public_message() -> None:
    again = error_from_json(through_json(error_to_json(EngineGenerateError("secret"))), "the public message")
    assert type(again) is EngineGenerateError
    assert str(again) == "the public message"
    assert error_to_json(ValueError("secret")) is None
    assert error_from_json(None, "unused") is None
