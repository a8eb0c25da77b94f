"""The wire format as bytes. Front ends and cores of one version speak it; a change must be on purpose.

After a change on purpose: `python tests/unit/types/test_wire_format.py` writes the fixture anew. Say in the commit what
changed, and that front ends and cores of both versions no longer understand each other.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.config.engine import EngineConfig
from trioengine.runtime.launch import CoreLaunch, read_launch, write_launch
from trioengine.transport.address import CurveKeys, Endpoint
from trioengine.types.codec import (
    MESSAGES,
    decode,
    decode_reply,
    encode,
    encode_reply,
    pack,
    reply_type,
    unpack,
)
from trioengine.types.messages import (
    CALLS,
    AbortRequests,
    AddLoRA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CallRequest,
    CheckIntegrity,
    CollectiveRPC,
    CoreLoad,
    CoreStats,
    EncodeCoreRequest,
    EngineCoreRequest,
    EngineDead,
    ErrorData,
    Finished,
    FinishWeightUpdate,
    FromCore,
    GetKVCacheEvents,
    GetLoad,
    GetStats,
    InitWeightTransfer,
    IsPaused,
    IsSleeping,
    KVCacheEvents,
    ListLoRAs,
    LogprobColumns,
    ModelFacts,
    PauseGeneration,
    PauseMode,
    PinLoRA,
    PooledOutput,
    Ready,
    RemoveLoRA,
    Reply,
    ResetMMCache,
    ResetPrefixCache,
    ResumeGeneration,
    SchedulerStats,
    Sleep,
    Starting,
    StartProfile,
    StartWave,
    StepOutput,
    Stop,
    StopProfile,
    ToCore,
    UpdateWeights,
    WakeUp,
    WeightTensor,
)
from trioengine.types.output import FinishReason
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.pooling import PoolingFacts, PoolingParams, PoolingTask, PoolingType
from trioengine.types.repetition import RepetitionDetectionParams
from trioengine.types.request import KVHints
from trioengine.types.structured import StructuredOutputsParams

FIXTURE = Path(__file__).parents[2] / "fixtures" / "wire.json"
ON_PURPOSE = f"The wire format has changed. On purpose? Then run: python {Path(__file__).name} (see its docstring)"

SAMPLING = SamplingParams(
    temperature=0.5,
    top_p=0.25,
    top_k=40,
    min_p=0.125,
    presence_penalty=1.0,
    frequency_penalty=-1.0,
    repetition_penalty=1.5,
    logit_bias={7: -100.0},
    seed=1,
    max_tokens=99,
    min_tokens=2,
    stop=("\n", "ende"),
    stop_token_ids=(3, 4),
    ignore_eos=True,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    detokenize=True,
    output_kind=RequestOutputKind.DELTA,
    allowed_token_ids=(1, 2),
    bad_words=("bad", "worse"),
    logprobs=3,
    prompt_logprobs=-1,
    structured_outputs=StructuredOutputsParams(json={"type": "object"}, whitespace_pattern=" ?"),
    logits_processors={"mine": {"strength": 0.5}},
    n=2,
    thinking_token_budget=100,
    skip_reading_prefix_cache=True,
    spaces_between_special_tokens=False,
    extra_args={"yours": {"strength": 0.5}},
    stream_interval=4,
    flat_logprobs=True,
    skip_clone=True,
    repetition_detection=RepetitionDetectionParams(max_pattern_size=20, min_pattern_size=2, min_count=3),
    logprob_token_ids=(5,),
    prompt_logprob_token_ids=(6,),
    prompt_logprob_start=1,
    trace_decode_token_ids=(7,),
    routed_experts_prompt_start=2,
)
LOGPROBS = LogprobColumns(
    slots=b"\1\0\0\0",
    counts=b"\2\0\0\0",
    ranks=b"\3\0\0\0",
    token_ids=b"\7\0\0\0\5\0\0\0",
    logprobs=b"\0\0\0\xc0\0\0\x80\xbf",
)

MESSAGES_BY_NAME: Mapping[str, ToCore | FromCore] = {
    "EngineCoreRequest": EngineCoreRequest(
        1,
        "id/0",
        b"\1\0\0\0\2\0\0\0",
        SAMPLING,
        2**64 - 1,
        (2, 5),
        -1,
        "salt",
        True,
        "polite",
        2.5,
        KVHints(read_prefix_cache=False, write_prefix_cache=False),
    ),
    "EngineCoreRequest, defaults": EngineCoreRequest(0, "", b"\0\0\0\0", SamplingParams(), 0),
    "EncodeCoreRequest": EncodeCoreRequest(
        1,
        "id/0",
        b"\1\0\0\0\2\0\0\0",
        PoolingParams(
            task=PoolingTask.TOKEN_EMBED,
            pooling_type=PoolingType.CLS,
            dimensions=3,
            normalize=True,
            use_activation=False,
        ),
        1,
        -1,
        "salt",
        "adapter",
        2.5,
    ),
    "EncodeCoreRequest, defaults": EncodeCoreRequest(0, "", b"\0\0\0\0", PoolingParams()),
    "AbortRequests": AbortRequests((0, 300)),
    "CallRequest GetLoad": CallRequest(5, GetLoad()),
    "CallRequest CheckIntegrity": CallRequest(6, CheckIntegrity()),
    "CallRequest GetKVCacheEvents": CallRequest(7, GetKVCacheEvents(after=3)),
    "CallRequest ResetPrefixCache": CallRequest(8, ResetPrefixCache()),
    "CallRequest PauseGeneration": CallRequest(9, PauseGeneration(PauseMode.WAIT, clear_cache=False)),
    "CallRequest ResumeGeneration": CallRequest(10, ResumeGeneration()),
    "CallRequest IsPaused": CallRequest(11, IsPaused()),
    "CallRequest Sleep": CallRequest(12, Sleep(level=2, mode=PauseMode.KEEP)),
    "CallRequest WakeUp": CallRequest(13, WakeUp(("kv_cache",))),
    "CallRequest IsSleeping": CallRequest(14, IsSleeping()),
    "CallRequest GetStats": CallRequest(15, GetStats()),
    "CallRequest AddLoRA": CallRequest(16, AddLoRA("polite", "/adapters/polite")),
    "CallRequest RemoveLoRA": CallRequest(17, RemoveLoRA("polite")),
    "CallRequest ListLoRAs": CallRequest(18, ListLoRAs()),
    "CallRequest PinLoRA": CallRequest(19, PinLoRA("polite")),
    "CallRequest ResetMMCache": CallRequest(20, ResetMMCache()),
    "CallRequest StartProfile": CallRequest(21, StartProfile("first")),
    "CallRequest StopProfile": CallRequest(22, StopProfile()),
    "CallRequest CollectiveRPC": CallRequest(23, CollectiveRPC("memory", '{"unit": "MB"}')),
    "CallRequest InitWeightTransfer": CallRequest(24, InitWeightTransfer("file")),
    "CallRequest UpdateWeights": CallRequest(
        25, UpdateWeights((WeightTensor("norm.weight", "float32", (1, 2), b"\0\0\0\xc0\0\0\x80\xbf"),))
    ),
    "CallRequest UpdateWeights, file": CallRequest(26, UpdateWeights(path="/weights/new.safetensors")),
    "CallRequest FinishWeightUpdate": CallRequest(27, FinishWeightUpdate("8")),
    "Stop": Stop(),
    "StartWave": StartWave(),
    "Starting": Starting("loading the weights", 0.25),
    "Ready": Ready(
        ModelFacts(2048, 49152, (2, 0), 20), 100, 16, {"max_num_seqs": "256: as configured"}, needs_lockstep=True
    ),
    "Ready, encoder": Ready(
        ModelFacts(
            512,
            30522,
            (),
            can_generate=False,
            pooling=PoolingFacts((PoolingTask.SCORE, PoolingTask.CLASSIFY), PoolingType.MEAN, True, 384, ("LABEL_0",)),
        ),
        512,
        512,
        {},
    ),
    "StepOutput": StepOutput(
        8,
        9,
        1.5,
        slots=b"\0\0\0\0\1\0\0\0",
        tokens=b"\7\0\0\0\7\0\0\0\7\0\0\0",
        counts=b"\1\0\0\0\2\0\0\0",
        finished=(
            Finished(0, FinishReason.STOP, stop_token_id=3),
            Finished(1, FinishReason.LENGTH),
            Finished(3, FinishReason.STOP, ends_with_text=True),
            Finished(2, FinishReason.ABORT, error=ErrorData("RequestError", {"message": "no", "param": None})),
        ),
        logprobs=LOGPROBS,
        prompt_logprobs=LOGPROBS,
        cached_tokens=b"\1\0\0\0\x10\0\0\0",
        pooled=PooledOutput(
            slots=b"\4\0\0\0\5\0\0\0",
            num_rows=b"\xff\xff\xff\xff\2\0\0\0",
            widths=b"\2\0\0\0\1\0\0\0",
            values=b"\0\0\0\xc0\0\0\x80\xbf\0\0\0\xc0\0\0\x80\xbf",
        ),
        scheduled=b"\1\0\0\0\xe8\3\0\0",
        preempted=b"\1\0\0\0",
        stats=SchedulerStats(1, 2, 0.5, 3, 4, 5, 6, 7, 8),
        weight_version="8",
    ),
    "StepOutput, defaults": StepOutput(0, 1, 2.5),
    "Reply": Reply(5, encode_reply(GetLoad, CoreLoad(1, 2, 3, 4))),
    "Reply, stats": Reply(15, encode_reply(GetStats, CoreStats(1, 2, 0.5, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, (8, 4)))),
    "Reply, KV cache events": Reply(
        7,
        encode_reply(
            GetKVCacheEvents,
            KVCacheEvents(
                last=6,
                num_lost=1,
                events=(BlockStored(0, b"h1", b"h0", b"\7\0\0\0"), BlockRemoved(0, b"h1"), AllBlocksCleared()),
            ),
        ),
    ),
    "Reply, error": Reply(6, error=ErrorData("EngineGenerateError", {"message": "no", "retry_after_s": 0.5})),
    "EngineDead": EngineDead(ErrorData("EngineDeadError", {"message": "gone", "cause": "Traceback"})),
}

LAUNCH = CoreLaunch(
    endpoints=(Endpoint("ipc:///tmp/x/zmq", directory="/tmp/x", curve=CurveKeys("public", None)),),
    rank=0,
    page_fd=7,
    config=EngineConfig(model="model.gguf", max_model_len=64, step_timeout_s=1.5),
    model=ModelLocation(ModelKind.GGUF, Path("/models/model.gguf"), "model"),
    options={"pace_s": "0.5"},
)


def launch_bytes(launch: CoreLaunch) -> bytes:
    """What the pipe to a new core carries."""
    read_fd, write_fd = os.pipe()
    try:
        write_launch(write_fd, launch)
        return os.read(read_fd, 1 << 16)
    finally:
        os.close(read_fd)
        os.close(write_fd)


def current_format() -> dict[str, str]:
    """All of it, as the fixture holds it."""
    messages = {name: encode(message).hex() for name, message in MESSAGES_BY_NAME.items()}
    # Its options are free to change: the parent is of the same version as the core that it starts.
    launch = unpack(launch_bytes(LAUNCH)[4:]) | {"config": {}}
    return messages | {"CoreLaunch without options": pack(launch).hex()}


@pytest.fixture(scope="module")
def recorded() -> dict[str, str]:
    return json.loads(FIXTURE.read_text())


def test_the_fixture_names_every_message_and_call() -> None:
    assert {type(message) for message in MESSAGES_BY_NAME.values()} == set(MESSAGES)
    calls = {type(message.call) for message in MESSAGES_BY_NAME.values() if isinstance(message, CallRequest)}
    assert calls == set(CALLS)


def test_bytes_are_those_recorded(recorded: dict[str, str]) -> None:
    """Whoever adds a field, renames one or moves a tag meets this test first."""
    assert current_format() == recorded, ON_PURPOSE


@pytest.mark.parametrize("name", MESSAGES_BY_NAME)
def test_recorded_bytes_are_read(name: str, recorded: dict[str, str]) -> None:
    assert decode(bytes.fromhex(recorded[name])) == MESSAGES_BY_NAME[name]


def test_a_launch_is_read_from_its_pipe_and_the_pipe_stays_open() -> None:
    """The same pipe tells the core later that its parent is gone."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    try:
        write_launch(write_fd, LAUNCH)
        assert read_launch(read_fd) == LAUNCH
        with pytest.raises(BlockingIOError):
            os.read(read_fd, 1)
    finally:
        os.close(read_fd)
        os.close(write_fd)


@pytest.mark.parametrize("num_bytes", [0, 3, 20])
def test_a_launch_that_is_cut_short_is_the_end_of_the_parent(num_bytes: int) -> None:
    read_fd, write_fd = os.pipe()
    os.write(write_fd, launch_bytes(LAUNCH)[:num_bytes])
    os.close(write_fd)
    try:
        with pytest.raises(EOFError, match="parent"):
            read_launch(read_fd)
    finally:
        os.close(read_fd)


def test_secrets_are_not_shown() -> None:
    """A launch in a log or a traceback tells nobody how to connect."""
    assert "public" not in repr(LAUNCH)


def test_replies_have_the_type_that_the_call_says() -> None:
    assert reply_type(GetLoad) is CoreLoad
    assert reply_type(CheckIntegrity) is type(None)
    load = CoreLoad(1, 2, 3, 4)
    assert decode_reply(GetLoad, encode_reply(GetLoad, load)) == load
    assert unpack(encode_reply(CheckIntegrity, None)) is None
    assert pack(None) == encode_reply(CheckIntegrity, None)


if __name__ == "__main__":
    FIXTURE.write_text(json.dumps(current_format(), indent=1) + "\n")
