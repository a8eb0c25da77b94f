"""What a folder says of its embeddings in the files of sentence-transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import attrs

from trioengine.errors import CheckpointError
from trioengine.models.config.facts import Facts, read_json
from trioengine.types.pooling import PoolingType

_POOLING_TYPES: Mapping[str, PoolingType] = {
    "cls": PoolingType.CLS,
    "mean": PoolingType.MEAN,
    "lasttoken": PoolingType.LAST,
}
_OLD_KEYS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Of folders in which each kind has a key of its own."""


@attrs.frozen
class SentenceTransformer:
    """How texts become vectors."""

    pooling_type: PoolingType
    normalize: bool
    max_length: int | None
    """Tokens that a text is cut to there."""


def read_sentence_transformer(folder: Path) -> SentenceTransformer | None:
    """What the folder says; None where it is no folder of sentence-transformers.

    Raises:
        CheckpointError: a file is malformed, or asks for something that is not supported.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    pooling_type, normalize = None, False
    for module in _modules(path):
        kind = module.text("type").rpartition(".")[2]
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                pooling_type = _pooling_type(_inside(folder, module) / "config.json")
            case "Normalize":
                normalize = True
            case _:
                raise module.error(f"the module {kind[:50]!r} is not supported; Transformer, Pooling and Normalize are")
    if pooling_type is None:
        raise CheckpointError(f"{path}: there is no module Pooling.", path=str(path))
    limits = folder / "sentence_bert_config.json"
    max_length = None
    if limits.is_file():
        max_length = Facts(read_json(limits), str(limits)).optional_size("max_seq_length")
    return SentenceTransformer(pooling_type, normalize, max_length)


def _modules(path: Path) -> list[Facts]:
    try:
        values: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:200]}.", path=str(path)) from error
    items = cast(list[object], values) if isinstance(values, list) else [None]
    if not all(isinstance(item, dict) for item in items):
        raise CheckpointError(f"{path} is not a list of objects.", path=str(path))
    return [Facts(cast(Mapping[str, object], item), str(path)) for item in items]


def _inside(folder: Path, module: Facts) -> Path:
    """The folder of a module, which is untrusted: it must not lead elsewhere."""
    name = module.text("path")
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise module.error(f"the path {name[:50]!r} is not one inside of the model's folder")
    return folder / name


def _pooling_type(path: Path) -> PoolingType:
    values = read_json(path)
    facts = Facts(values, str(path))
    if facts.has("pooling_mode"):
        names = list(facts.texts("pooling_mode")) if facts.is_list("pooling_mode") else [facts.text("pooling_mode")]
    else:
        names = [name for key, name in _OLD_KEYS.items() if facts.flag(key, False)]
    if len(names) != 1 or names[0] not in _POOLING_TYPES:
        raise facts.error(
            f"the pooling {' and '.join(names)[:50] or 'none'} is not supported; {', '.join(_POOLING_TYPES)} are"
        )
    if not facts.flag("include_prompt", True):
        raise facts.error("include_prompt is false, which is not supported")
    return _POOLING_TYPES[names[0]]
