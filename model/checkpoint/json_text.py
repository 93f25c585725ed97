"""Parse JSON that others wrote."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; every kind of bad text is a ValueError.

    The library itself raises a RecursionError for deep nesting, keeps the last of two values of one key, and reads keys
    that are no text (half of a surrogate pair), on which any later output would fail.
    """
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{double!r} occurs twice in one object")
    try:
        "".join(values).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a key has half of a surrogate pair: {error.object[:100]!r}") from None
    return values
