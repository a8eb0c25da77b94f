"""The native CPU kernels for tests: built once into the user's cache."""

import pytest
from trioengine_kernels.native.library import Library, NativeUnavailableError, load_library

from trioengine.config import env


def native_library() -> Library:
    """The library that an engine would load. A test that asks for it is skipped where it cannot be built."""
    try:
        return load_library(env.cache_dir() / "native")
    except NativeUnavailableError as error:
        pytest.skip(str(error))
