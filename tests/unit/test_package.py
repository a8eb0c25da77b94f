"""What `import trioengine` gives."""

import subprocess
import sys
from pathlib import Path

import trioengine

VLLMS = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLM",
    "LLMEngine",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]
"""Names of vLLM's top level that mean the same here."""


def test_every_name_is_there() -> None:
    for name in (*trioengine.__all__, *VLLMS):
        value = getattr(trioengine, name)
        assert getattr(value, "__name__", name) == name
        assert name in dir(trioengine)


def test_it_imports_nothing_before_a_name_is_asked_for() -> None:
    code = "import sys, trioengine; print([name for name in ('trio', 'torch', 'numpy', 'zmq') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_type_checkers_of_others_read_its_types() -> None:
    """PEP 561's mark."""
    assert trioengine.__file__ is not None
    assert (Path(trioengine.__file__).parent / "py.typed").is_file()
