"""Records every drafter's proposals at every position of the target's answers, for ``outrider bench policies``."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.fixtures import MAX_BATCH, Fixtures
from benchmarks.pool import pool
from benchmarks.prompts import BenchPrompt, choose_prompts, load_prompts
from benchmarks.report import BenchOptions
from drafters.protocol import Demand, Drafter
from drafters.replay import Recording
from engine.acceptance import common_prefix_len
from simulator.recording import AgreementRecording, Recorder

DRAFT_LEN = 8
NUM_NEW_TOKENS = 128
MAX_PER_DOMAIN = 40
NUM_QUICK = 30
DEFAULT_PATH = Path("build/outrider-recording.npz")


Agreement = tuple[int, tuple[float, ...]]  # accepted tokens of a draft, and the confidences of all its tokens


def agreement(drafter: Drafter, recordings: Sequence[Recording], draft_len: int) -> list[list[Agreement]]:
    """Agreement of the draft that begins at each position, by recording.

    All recordings are served together and committed token by token, so a learning drafter also learns from drafts at
    positions where its rounds would not begin.
    """
    found: list[list[Agreement]] = [[] for _ in recordings]
    for recording in recordings:
        drafter.open(recording.name, recording.prompt_token_ids, len(recording.prompt_token_ids), recording.sampling)
    live = [number for number, recording in enumerate(recordings) if recording.output_token_ids]
    position = 0
    while live:
        drafts = drafter.propose([Demand(recordings[number].name, draft_len) for number in live])
        for number, draft in zip(live, drafts, strict=True):
            recording = recordings[number]
            num_right = common_prefix_len(draft.token_ids, recording.output_token_ids[position:])
            found[number].append((num_right, draft.confidences))
            drafter.extend(recording.name, recording.output_token_ids[position : position + 1])
        position += 1
        for number in live:
            if len(recordings[number].output_token_ids) == position:
                drafter.release(recordings[number].name)
        live = [number for number in live if len(recordings[number].output_token_ids) > position]
    return found


def record(options: BenchOptions) -> AgreementRecording:
    """Answers at temperature 0, to MAX_PER_DOMAIN prompts of each domain, or NUM_QUICK in all with ``--quick``."""
    console = Console(stderr=True)
    configs = pool(options.model)
    fixtures = Fixtures(options.model, configs, NUM_NEW_TOKENS)
    prompts = _prompts(options)
    drafters = {config.name: fixtures.make(config) for config in configs}
    recorder = Recorder(options.model, [(c.name, c.options.kind) for c in configs], DRAFT_LEN, 0.0)
    domains = {prompt.id: prompt.domain for prompt in prompts}
    num_done = 0
    for answers in fixtures.record(prompts, (0.0,)):
        part = answers[0.0]
        with fixtures.holding(part):
            found = {name: agreement(drafter, part, DRAFT_LEN) for name, drafter in drafters.items()}
        for number, one in enumerate(part):
            if one.output_token_ids:
                prompt_id = one.name.partition("/")[2].rpartition("@")[0]
                recorder.add(
                    prompt_id,
                    domains[prompt_id],
                    len(one.prompt_token_ids),
                    [found[config.name][number] for config in configs],
                )
        num_done += len(part)
        console.print(f"record: {num_done} of {len(prompts)} answers, batches of {MAX_BATCH}", highlight=False)
    return recorder.recording()


def _prompts(options: BenchOptions) -> list[BenchPrompt]:
    paths = options.prompts or options.data_prompts
    if options.quick or not paths:
        return choose_prompts(paths, NUM_QUICK if options.quick else 120)
    return load_prompts(paths, MAX_PER_DOMAIN)
