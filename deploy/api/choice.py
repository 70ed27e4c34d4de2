"""One choice of an answer: turns commits into text."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus

from cluster.errors import LinkClosed, OutriderError, Overloaded
from cluster.types import Commit, FinishReason, ModelInfo, Prefill, Request, TokenLogprobs
from deploy.api.answer_parts import CallStart, Part, ReasoningParser, merged
from deploy.api.draft_counts import DraftingCounts
from deploy.api.errors import ApiError
from deploy.api.tokenizer import Detokenizer, Tokenizer


class EngineFailed(OutriderError):
    """The engine failed on a request; says why."""


@dataclass(frozen=True, slots=True)
class OutputToken:
    """A token and its characters ``start`` to ``end`` of the choice's text; a character belongs to its last token. One that
    ends the answer has none."""

    id: int
    start: int
    end: int
    drafter: str | None  # None: the target's own token
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive text from one drafter, or from the target (None)."""

    text: str
    drafter: str | None


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a choice. ``tokens``: those whose text is complete now."""

    text: str
    tokens: tuple[OutputToken, ...] = ()
    segments: tuple[Segment, ...] = ()
    finish: FinishReason | None = None
    parts: tuple[Part, ...] = ()  # of the text, where it is parsed


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Which tokens become text, and what is reported beside it."""

    details: bool = False  # keep tokens, for log-probabilities and drafted segments
    token_ids: bool = False  # report the ids of generated tokens
    skip_special_tokens: bool = True  # they add no text
    include_stop: bool = False  # the stop string or token is part of the text
    echo: str | None = None  # text put before the answer
    new_parser: Callable[[], ReasoningParser] | None = None  # of tool calls and reasoning
    shown: Collection[int] = ()  # special tokens that are text
    short_ids: bool = False  # of tool calls
    prompt_logprobs: bool = False  # report them, beside what ``echo`` reports
    is_prompt_only: bool = False  # max_tokens was 0, which is computed as 1: the token is no part of the answer


# For metrics: a commit, how many of its tokens are in the answer, and the seconds since the previous ones (None at first).
OnTokens = Callable[[Commit, int, float | None], None]


class Choice:
    """Detokenizes, applies stop strings, and counts. Text is released as soon as no stop string can start in it.

    ``counts_prompt``: whether this choice is the first of its prompt; prompt tokens are counted once.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        info: ModelInfo,
        options: OutputOptions,
        *,
        counts_prompt: bool = True,
        on_tokens: OnTokens | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.options = options
        self.counts_prompt = counts_prompt
        self.prefill: Prefill | None = None
        self.failed = False  # by the engine
        self.is_sent = False  # to the cluster
        self.is_served = False  # a commit came
        self.is_refused = False  # no target took it
        self.counts = DraftingCounts()
        self.num_tokens = 0  # tokens of the answer, including the one that ended it
        self.num_reasoning_tokens = 0  # of them
        self.num_calls = 0  # of tools
        self.ends_in_call = False  # the last of them is not complete
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's tokens from the second on
        self.finish: FinishReason | None = None
        self.admitted_s: float | None = None  # when its call left the queue of the API
        self.first_token_s: float | None = None  # time of the first and the newest token
        self.last_token_s: float | None = None
        sampling = request.sampling
        self._eos_ids = frozenset(() if sampling.ignore_eos else info.eos_token_ids)
        self._end_ids = self._eos_ids | frozenset(sampling.stop_token_ids)
        self._stop_token_id: int | None = None  # of the caller's, which ended the answer
        self._on_tokens = on_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=options.skip_special_tokens, shown=options.shown)
        self._parser = None if options.new_parser is None else options.new_parser()
        self._parts: list[Part] = []
        self._stops = StopMatcher(sampling.stop, include=options.include_stop)
        self._decoded_len = 0  # characters detokenized
        self._taken_len = 0  # characters returned by ``take``
        self._released: list[str] = []  # text between them, free of stop strings
        self._tokens: deque[OutputToken] = deque()  # tokens whose text is not taken yet

    @property
    def outcome(self) -> FinishReason:
        """Why it ended; ABORT of one that is not complete."""
        return FinishReason.ERROR if self.failed else self.finish or FinishReason.ABORT

    @property
    def is_counted(self) -> bool:
        """Whether it has an outcome for metrics; a choice that was refused before its first token has none."""
        return self.finish is not None or self.failed or self.first_token_s is not None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        return None if self.first_token_s is None or self.last_token_s is None else self.last_token_s - self.first_token_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first."""
        return None if self.decode_s is None or self.num_tokens < 2 else self.decode_s / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Of a complete answer."""
        return None if self.finish is None or self.last_token_s is None else self.last_token_s - self.request.arrival_s

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice; None: it ended otherwise."""
        return self._stops.matched

    @property
    def stop_reason(self) -> str | int | None:
        """vLLM's: the stop string or the caller's stop token that ended it; None: it ended otherwise."""
        return self._stop_token_id if self.stop_string is None else self.stop_string

    def absorb(self, commit: Commit, now_s: float) -> None:
        """Adds the next commit. Sets ``finish`` if it completes the answer, by the engine or by a stop string.

        Raises EngineFailed, ApiError, Overloaded or LinkClosed: the engine ended the request without completing it.
        """
        match commit.finish:
            case FinishReason.ERROR:
                self.failed = True
                raise EngineFailed(commit.error or "the engine failed")
            case FinishReason.REFUSED:
                self.finish = FinishReason.REFUSED
                raise ApiError(HTTPStatus.BAD_REQUEST, commit.error or "the request is not possible", code="not_possible")
            case FinishReason.OVERLOADED:
                raise Overloaded(commit.error or "too many requests wait", retry_after_s=1.0)
            case FinishReason.ABORT | FinishReason.DRAINING:
                raise LinkClosed(commit.error or "the request was aborted")
        self.is_served = True
        self.prefill = commit.prefill or self.prefill
        self.prompt_logprobs += commit.prompt_logprobs
        if self.options.is_prompt_only and commit.token_ids:
            self.finish = FinishReason.LENGTH
            return
        num_before, ending = self.num_tokens, None
        for i, token_id in enumerate(commit.token_ids, start=1):
            self.num_tokens += 1
            is_last = i == len(commit.token_ids)
            ends = is_last and commit.finish is FinishReason.STOP and token_id in self._end_ids
            if self._parser is not None and self._parser.is_reasoning:
                self.num_reasoning_tokens += 1
            if ends and token_id not in self._eos_ids:
                self._stop_token_id = token_id
            if ends and not self.options.include_stop:
                ending = i - 1
                break  # counted, but not part of the text
            self._append(commit, i - 1)
            if self._stops.matched:
                self.finish = FinishReason.STOP
                break
        if self.num_tokens > num_before:
            num_needed = self.num_tokens - num_before
            self.counts.record(commit, num_needed)
            if self._on_tokens is not None:
                gap_s = None if self.last_token_s is None else now_s - self.last_token_s
                self._on_tokens(commit, num_needed, gap_s)
            self.first_token_s = now_s if self.first_token_s is None else self.first_token_s
            self.last_token_s = now_s
        if self.finish is None and commit.finish is not None:
            self.finish = commit.finish
            self._flush()
        if ending is not None:
            self._keep(commit, ending, self._decoded_len)

    def take(self) -> Delta | None:
        """The new text; None if there is none."""
        if self.finish is None and not (self._released if self._parser is None else self._parts):
            return None
        if self._parser is not None and self.finish is not None:
            self._parse(self._parser.end())
            self.ends_in_call = self._parser.is_cut
        text = "".join(self._released)
        self._released.clear()
        tokens, segments = self._take_tokens(text)
        delta = Delta(text, tokens, segments, self.finish, tuple(merged(self._parts)))
        self._parts.clear()
        self._taken_len += len(text)
        return delta

    def _append(self, commit: Commit, i: int) -> None:
        text = self._detokenizer.feed(commit.token_ids[i])
        start = self._decoded_len
        self._release(text)
        self._keep(commit, i, start)

    def _keep(self, commit: Commit, i: int, start: int) -> None:
        if self.options.details or self.options.token_ids:
            drafter = commit.drafter if i < commit.num_accepted else None
            logprobs = commit.logprobs[i] if i < len(commit.logprobs) else None
            self._tokens.append(OutputToken(commit.token_ids[i], start, self._decoded_len, drafter, logprobs))

    def _release(self, text: str) -> None:
        self._decoded_len += len(text)
        released = self._stops.feed(text, armed=self.num_tokens >= self.request.sampling.min_tokens)
        if released:
            self._released.append(released)
            if self._parser is not None:
                self._parse(self._parser.feed(released))

    def _parse(self, parts: Iterable[Part]) -> None:
        for part in parts:
            self._parts.append(part)
            self.num_calls += isinstance(part, CallStart)

    def _flush(self) -> None:
        """An incomplete character at the end belongs to the last token."""
        text = self._detokenizer.flush()
        if text:
            self._release(text)
            if self._tokens:
                self._tokens.append(replace(self._tokens.pop(), end=self._decoded_len))
        if self._stops.matched:
            self.finish = FinishReason.STOP
        elif held := self._stops.flush():
            self._released.append(held)
            if self._parser is not None:
                self._parse(self._parser.feed(held))

    def _take_tokens(self, text: str) -> tuple[tuple[OutputToken, ...], tuple[Segment, ...]]:
        """The tokens whose text ends in ``text``, all remaining ones if it is the last, also those of a stop string that is
        cut off, and ``text`` by drafter."""
        begin, end = self._taken_len, self._taken_len + len(text)
        tokens: list[OutputToken] = []
        pieces: list[tuple[str | None, list[str]]] = []  # by drafter
        for token in self._tokens:
            if token.start >= end and self.finish is None:
                break  # its text comes later
            if token.end <= end or self.finish is not None:
                tokens.append(token)
            piece = text[max(token.start, begin) - begin : token.end - begin]
            if piece and pieces and pieces[-1][0] == token.drafter:
                pieces[-1][1].append(piece)
            elif piece:
                pieces.append((token.drafter, [piece]))
        for _ in range(sum(token.end <= end for token in tokens)):
            self._tokens.popleft()
        return tuple(tokens), tuple(Segment("".join(texts), drafter) for drafter, texts in pieces)


class StopMatcher:
    """Releases text until a stop string is complete; holds back the longest suffix that may begin one.

    The stop string that ends first ends the text; among several, the longest, however the text is split.

        released    | held back
        ------------+------------------------------------------------------------------
        "The answer"| "\\n\\nUs"     (with the stop string "\\n\\nUser:")
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``include``: keep the stop string in the text."""
        self._include = include
        self._overlaps = dict.fromkeys(stops, 0)  # length of each stop string's proper prefix that the text ends with
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def feed(self, text: str, *, armed: bool = True) -> str:
        """The released text; after a match ``matched`` is set and the text ends. ``armed`` False: ignores stop strings that
        end in ``text``.
        """
        known = self._held + text
        if armed:
            starts = {stop: known.find(stop, max(0, len(self._held) + 1 - len(stop))) for stop in self._overlaps}
            matches = [(start + len(stop), start, stop) for stop, start in starts.items() if start >= 0]
            if matches:
                end, start, self.matched = min(matches)
                self._held = ""
                return known[: end if self._include else start]
        for stop, overlap in self._overlaps.items():
            longest = min(len(stop) - 1, overlap + len(text))  # bounded by the last overlap: linear time
            self._overlaps[stop] = next(num for num in range(longest, -1, -1) if known.endswith(stop[:num]))
        num_released = len(known) - max(self._overlaps.values(), default=0)
        self._held = known[num_released:]
        return known[:num_released]

    def flush(self) -> str:
        """The held-back text, at the end of the answer."""
        held, self._held = self._held, ""
        return held
