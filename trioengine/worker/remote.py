"""Methods of executors and models that others may call by their names (`CollectiveRPC`): those that are marked."""

import inspect
import json
from collections.abc import Callable
from typing import TypeVar

from trioengine.errors import RequestError

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])
_MARK = "__is_collective_rpc__"


def collective_rpc(method: FunctionT) -> FunctionT:
    """Mark a method: it takes and returns what JSON can say, and is called between two steps."""
    setattr(method, _MARK, True)
    return method


def call_remotely(target: object, method: str, arguments: str) -> str:
    """Call a marked method; its result as JSON.

    Args:
        target: whose method it is.
        method: its name.
        arguments: a JSON object of keyword arguments.

    Raises:
        RequestError: there is no such method, or it does not take these arguments.
    """
    function = inspect.getattr_static(type(target), method, None)
    if not getattr(function, _MARK, False):
        known = ", ".join(sorted(name for name, value in inspect.getmembers(type(target)) if hasattr(value, _MARK)))
        raise RequestError(
            f"There is no method {method[:100]!r} for collective RPC. There are: {known}.", param="method"
        )
    bound = getattr(target, method)
    try:
        keywords = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The arguments of {method} are no JSON: {error}", param="arguments") from error
    if not isinstance(keywords, dict):
        raise RequestError(f"The arguments of {method} must be a JSON object.", param="arguments")
    try:
        inspect.signature(bound).bind(**keywords)
    except TypeError as error:
        raise RequestError(f"{method} does not take these arguments: {error}.", param="arguments") from error
    return json.dumps(bound(**keywords))
