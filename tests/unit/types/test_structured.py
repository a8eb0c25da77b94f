import pytest

from trioengine.errors import RequestError
from trioengine.types.structured import StructuralTag, StructuredOutputsParams

TAG = {"structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f="]}


@pytest.mark.parametrize(
    "params",
    [
        StructuredOutputsParams(json={"type": "object"}),
        StructuredOutputsParams(json=True),
        StructuredOutputsParams(json='{"type": "object"}', whitespace_pattern=" ?"),
        StructuredOutputsParams(json_object=True),
        StructuredOutputsParams(regex="a+"),
        StructuredOutputsParams(choice=["a", "b"]),  # pyright: ignore[reportArgumentType]
        StructuredOutputsParams(grammar='start: "a"'),
        StructuredOutputsParams(structural_tag=TAG),
    ],
)
def test_one_form_is_fine(params: StructuredOutputsParams) -> None:
    assert params.validate() is None


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (StructuredOutputsParams(), "structured_outputs"),
        (StructuredOutputsParams(json={}, regex="a"), "structured_outputs"),
        (StructuredOutputsParams(json_object=True, choice=("a",)), "structured_outputs"),
        (StructuredOutputsParams(json_object="yes"), "structured_outputs.json_object"),  # pyright: ignore[reportArgumentType]
        (StructuredOutputsParams(json='{"type": '), "structured_outputs.json"),
        (StructuredOutputsParams(json="[1]"), "structured_outputs.json"),
        (StructuredOutputsParams(json='{"minimum": NaN}'), "structured_outputs.json"),
        (StructuredOutputsParams(json='{"minimum": 1e999}'), "structured_outputs.json"),
        (StructuredOutputsParams(json="[" * 100_000), "structured_outputs.json"),
        (StructuredOutputsParams(json='{"title": "' + "a" * 262_144 + '"}'), "structured_outputs.json"),
        (StructuredOutputsParams(regex=5), "structured_outputs.regex"),  # pyright: ignore[reportArgumentType]
        (StructuredOutputsParams(regex="a" * 65_537), "structured_outputs.regex"),
        (StructuredOutputsParams(regex="\ud800"), "structured_outputs.regex"),
        (StructuredOutputsParams(choice=()), "structured_outputs.choice"),
        (StructuredOutputsParams(choice=("a", "a")), "structured_outputs.choice"),
        (StructuredOutputsParams(choice=("a", "")), "structured_outputs.choice[1]"),
        (StructuredOutputsParams(choice=("a", 5)), "structured_outputs.choice[1]"),  # pyright: ignore[reportArgumentType]
        (StructuredOutputsParams(choice=("a" * 40_000, "b" * 40_000)), "structured_outputs.choice"),
        (StructuredOutputsParams(regex="a", whitespace_pattern=" ?"), "structured_outputs.whitespace_pattern"),
        (StructuredOutputsParams(structural_tag="[]"), "structured_outputs.structural_tag"),
    ],
)
def test_the_field_at_fault_is_named(params: StructuredOutputsParams, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        params.validate()
    assert caught.value.param == param
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"structures": []}, "/structures"),
        ({"structures": ["a"]}, "/structures/0"),
        ({"structures": [{"begin": "<f=a>", "schema": {}}]}, "/structures/0/end"),
        ({"structures": [{"begin": 1, "schema": {}, "end": ""}]}, "/structures/0/begin"),
        ({"structures": [{"begin": "<f=a>", "schema": [], "end": ""}]}, "/structures/0/schema"),
        ({"structures": [{"begin": "<g>", "schema": {}, "end": ""}]}, "/structures/0/begin"),
        ({"structures": [{"begin": "<f=a>", "schema": {}, "end": "", "style": 1}]}, "/structures/0/style"),
        ({"triggers": []}, "/triggers"),
        ({"triggers": ["<f=", ""]}, "/triggers/1"),
        ({"format": {}}, "/format"),
        ({"at_least_one": 1}, "/at_least_one"),
        ({"stop_after_first": None}, "/stop_after_first"),
        ({"otherwise": []}, "/otherwise"),
    ],
)
def test_the_place_in_a_structural_tag_is_named(change: dict[str, object], path: str) -> None:
    with pytest.raises(RequestError, match=f"structured_outputs.structural_tag: {path} "):
        StructuredOutputsParams(structural_tag=TAG | change).validate()


def test_a_tag_belongs_to_its_longest_trigger() -> None:
    params = StructuredOutputsParams(structural_tag=TAG | {"triggers": ["<", "<f=", "<g"]})
    assert params.tags() == (StructuralTag("<f=", "<f=a>", {"type": "object"}, "</f>"),)
