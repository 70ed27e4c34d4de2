"""Starters of self-written prompts, by domain: an instruction-tuned model continues its chat template and a starter as a
user would ("Magpie", arXiv 2406.08464). After the empty starter it also chooses the subject."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Starters:
    texts: tuple[str, ...]
    one_line: bool  # prompts end with their first line; longer ones are rarely ended by the model itself


_FILE = Path(__file__).with_suffix(".json")
STARTERS = {
    domain: Starters(tuple(starters["texts"]), starters["one_line"])
    for domain, starters in json.loads(_FILE.read_text(encoding="utf-8")).items()
}
