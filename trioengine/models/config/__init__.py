"""The facts of a model that its code needs, read from a GGUF file's metadata or a folder's `config.json`.

Model files are untrusted input: every value is checked for its kind and range, and what this engine cannot run is
refused here, before any weight is read. This package does not import torch and knows nothing about tensors but names.
"""

from trioengine.models.config.families import FAMILIES, Family
from trioengine.models.config.from_folder import ARCHITECTURES, CLASSIFYING, config_from_folder
from trioengine.models.config.from_gguf import LONG_ROPE_FACTORS, ROPE_FACTORS, config_from_gguf
from trioengine.models.config.labels import HeadConfig, LabelActivation
from trioengine.models.config.model import (
    Activation,
    Architecture,
    Experts,
    KVGroup,
    ModelConfig,
    NormPlacement,
    QueryKeyNorm,
)
from trioengine.models.config.rope import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    Rope,
    RopeFactors,
    RopeScaling,
    YarnRopeScaling,
)

__all__ = [
    "ARCHITECTURES",
    "CLASSIFYING",
    "FAMILIES",
    "LONG_ROPE_FACTORS",
    "ROPE_FACTORS",
    "Activation",
    "Architecture",
    "Experts",
    "Family",
    "HeadConfig",
    "KVGroup",
    "LabelActivation",
    "LinearRopeScaling",
    "Llama3RopeScaling",
    "LongRopeScaling",
    "ModelConfig",
    "NormPlacement",
    "QueryKeyNorm",
    "Rope",
    "RopeFactors",
    "RopeScaling",
    "YarnRopeScaling",
    "config_from_folder",
    "config_from_gguf",
]
