"""Structured output: answers for many JSON schemas are valid, end, and are the same with drafting and without.

Schemas are generated (``json_schemas``); with ``--data FOLDER`` those of the JSON-Schema-Test-Suite in
FOLDER/JSON-Schema-Test-Suite/tests/draft2020-12 join them. A schema that is refused yields no answer and is counted apart.
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jsonschema
from rich.console import Console

from benchmarks.embedded import Completion, EmbeddedCluster
from benchmarks.json_schemas import Schema, bounded_schemas, escaping_schemas, make_schemas
from benchmarks.prompts import encode_chats
from benchmarks.report import BenchOptions, BenchResult, Cell, Table
from benchmarks.serve import local_config
from cluster.errors import InvalidField
from cluster.sampling_params import Grammar, GrammarKind, SamplingParams
from cluster.types import FinishReason, Request
from deploy.api.tokenizer import Tokenizer
from engine.grammar.compiling import Grammars
from engine.grammar.vocabulary import GrammarVocabulary
from engine.models.prepare import ensure_model

NUM_SCHEMAS, NUM_SCHEMAS_QUICK = 300, 40
MAX_TOKENS = 128
PROMPT = "Invent an example that matches this JSON schema. Answer with JSON only.\n"
BATCH = 16
NUM_TIMED, NUM_TIMED_QUICK = 12, 4  # schemas, at batch 1
NUM_TURNS = 3
SUITE = Path("JSON-Schema-Test-Suite/tests/draft2020-12")


@dataclass(frozen=True, slots=True)
class Asked:
    """A schema that the server takes, and a prompt for it."""

    schema: Schema
    prompt: tuple[int, ...]

    def request(self, name: str, temperature: float, drafting: bool) -> Request:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(self.schema))
        sampling = SamplingParams(MAX_TOKENS, temperature=temperature, seed=len(self.prompt), grammar=grammar)
        return Request(name, self.prompt, sampling, arrival_s=0.0, chain=None if drafting else ())


@dataclass(frozen=True, slots=True)
class Outcome:
    """Answers at one temperature, in the order of the schemas."""

    num: int
    num_valid: int
    num_ended: int
    num_identical: int
    num_proposed: int
    num_accepted: int


def run(options: BenchOptions) -> BenchResult:
    """Figures: ``valid_fraction``, ``ended_fraction`` and ``identical_fraction`` for ``t0`` and ``t1``;
    ``refused_fraction`` of the suite's schemas; ``compile_cpu_s.max``: processor time to compile a schema with bounds of 1
    to 4,000, of which ``first`` is the first one, with what is computed once a vocabulary; ``structured_speedup.batch_1``:
    time without drafting over with it."""
    folder = ensure_model(options.model)
    tokenizer = Tokenizer.from_folder(folder)
    console = Console(stderr=True)
    with _cluster(options.model, "float32") as cluster:
        grammars = cluster.grammars
        assert grammars is not None, "the model of a benchmark has a known tokenizer"
        generated = make_schemas(NUM_SCHEMAS_QUICK if options.quick else NUM_SCHEMAS)
        suite = list(_suite(options.data)) if options.data is not None else []
        taken = [schema for schema in suite if _is_taken(grammars, schema)]
        schemas = [*generated, *escaping_schemas(), *taken]
        prompts = encode_chats(tokenizer, [PROMPT + json.dumps(schema)[:2000] for schema in schemas])
        asked = [Asked(*one) for one in zip(schemas, prompts, strict=True)]
        outcomes = {}
        for temperature in (0.0, 1.0):
            console.print(f"structured: {len(asked)} schemas at temperature {temperature:g}", highlight=False)
            outcomes[f"t{temperature:g}"] = _outcome(cluster, tokenizer, asked, temperature)
        compile_s = _compile_s(grammars)
    with _cluster(options.model, "auto") as cluster:
        timed = asked[: NUM_TIMED_QUICK if options.quick else NUM_TIMED]
        speedup = _speedup(cluster, timed)
    result = _result(outcomes, speedup, len(suite), len(taken))
    compiled = {"compile_cpu_s.first": compile_s[0], "compile_cpu_s.max": max(compile_s)}
    return replace(result, figures={**result.figures, **compiled})


def _cluster(model: str, dtype: str) -> EmbeddedCluster:
    config = local_config(model)
    target = config.target.model_copy(update={"dtype": dtype})
    return EmbeddedCluster.of(config.model_copy(update={"target": target}))


def _suite(data: Path) -> Iterator[Schema]:
    for path in sorted((data / SUITE).glob("*.json")):
        for case in json.loads(path.read_text()):
            if isinstance(case["schema"], dict):
                yield case["schema"]


def _is_taken(grammars: Grammars, schema: Schema) -> bool:
    try:
        return grammars.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))).shortest_len is not None
    except InvalidField:
        return False


def _compile_s(grammars: Grammars) -> list[float]:
    """Processor time to compile each schema with bounds; of the first one, with what is computed once a vocabulary."""
    known = grammars.vocabulary
    fresh, seconds = Grammars(GrammarVocabulary(known.folder, known.size, known.eos_token_ids)), list[float]()
    for schema in bounded_schemas():
        begin_s = time.process_time()
        fresh.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
        seconds.append(time.process_time() - begin_s)
    return seconds


def _outcome(cluster: EmbeddedCluster, tokenizer: Tokenizer, asked: Sequence[Asked], temperature: float) -> Outcome:
    plain, drafted = (
        cluster.complete([one.request(f"{i}", temperature, drafting) for i, one in enumerate(asked)], BATCH)
        for drafting in (False, True)
    )
    return Outcome(
        num=len(asked),
        num_valid=sum(_is_valid(one.schema, tokenizer, done) for one, done in zip(asked, drafted, strict=True)),
        num_ended=sum(done.commits[-1].finish is FinishReason.STOP for done in drafted),
        num_identical=sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True)),
        num_proposed=sum(done.num_proposed for done in drafted),
        num_accepted=sum(done.num_accepted for done in drafted),
    )


def _is_valid(schema: Schema, tokenizer: Tokenizer, done: Completion) -> bool:
    try:
        jsonschema.validate(json.loads(tokenizer.decode(done.token_ids)), schema, jsonschema.Draft202012Validator)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def _speedup(cluster: EmbeddedCluster, asked: Sequence[Asked]) -> float:
    """At batch 1 and temperature 0: the median over turns of the time without drafting over the time with it."""
    ratios = []
    for turn in range(NUM_TURNS + 1):  # the first turn warms up
        seconds = []
        for drafting in (False, True):
            begin_s = time.monotonic()
            cluster.complete([one.request(f"{turn}-{drafting}-{i}", 0.0, drafting) for i, one in enumerate(asked)], 1)
            seconds.append(time.monotonic() - begin_s)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[1:])


def _result(outcomes: dict[str, Outcome], speedup: float, num_suite: int, num_taken: int) -> BenchResult:
    figures: dict[str, float] = {}
    rows: list[tuple[Cell, ...]] = []
    for name, one in outcomes.items():
        figures[f"valid_fraction.{name}"] = one.num_valid / one.num
        figures[f"ended_fraction.{name}"] = one.num_ended / one.num
        figures[f"identical_fraction.{name}"] = one.num_identical / one.num
        rows.append((name, one.num, one.num_valid, one.num_ended, one.num_identical, one.num_proposed, one.num_accepted))
    figures["structured_speedup.batch_1"] = speedup
    if num_suite:
        figures["refused_fraction"] = 1 - num_taken / num_suite
    columns = ("temperature", "schemas", "valid", "ended", "same without drafts", "proposed", "accepted")
    return BenchResult(bench="structured", figures=figures, tables=(Table("Structured output", columns, tuple(rows)),))
