"""Fields of a drafter's ``config.json``. All raise ModelUnavailable with a line that names the field."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from cluster.errors import ModelUnavailable
from drafters.hidden_states.config import MARKOV_KINDS, MarkovKind


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelUnavailable(f"{path} is missing: the folder holds no trained drafter, or an incomplete one") from error
    except NotADirectoryError as error:
        raise ModelUnavailable(f"{path.parent} is not a folder: name the folder of a trained drafter") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{path} is not valid JSON ({error}); it may be half-written") from error


def whole_number(raw: Mapping[str, Any], key: str, low: int, high: int = 2**31 - 1) -> int:
    value = raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModelUnavailable(f"{key} must be a whole number between {low} and {high}, got {value!r}")
    return value


def markov_kind(value: Any) -> MarkovKind:
    if value not in MARKOV_KINDS:
        raise ModelUnavailable(f"markov_head_type {value!r} is not supported; supported are {', '.join(MARKOV_KINDS)}")
    return cast(MarkovKind, value)


def ascending(raw: Mapping[str, Any], key: str, low: int, high: int) -> tuple[int, ...]:
    ids = raw[key]
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not all(type(item) is int for item in ids):
        raise ModelUnavailable(f"{key} must be a list of whole numbers")
    if not ids or any(a >= b for a, b in pairwise(ids)) or ids[0] < low or ids[-1] > high:
        raise ModelUnavailable(f"{key} must ascend between {low} and {high}")
    return tuple(ids)
