"""Requests by what a test says of them."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from cluster.sampling_params import SamplingParams
from cluster.types import Request

REQUEST_FIELDS = {field.name for field in fields(Request)}


def a_request(name: str = "r", prompt: Iterable[int] = (1, 2, 3), **parameters: Any) -> Request:
    """Fields of the request, and of its sampling parameters, by their names; ``sampling`` gives the latter as a whole."""
    own = {key: parameters.pop(key) for key in REQUEST_FIELDS & parameters.keys()}
    sampling = own.pop("sampling", None) or SamplingParams(**parameters)
    return Request(name, tuple(prompt), sampling, own.pop("arrival_s", 0.0), **own)
