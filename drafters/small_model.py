"""A causal model in step with requests: its choice at any position, for the cost of the rows not computed yet."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

import numpy as np
import torch

from cluster.sampling_params import SamplingParams
from drafters.other_vocabulary import OtherVocabulary
from drafters.reduced_vocab import ReducedHead
from engine.acceptance import common_prefix_len
from engine.device import to_device
from engine.forward import CausalModel, PackedSpan
from engine.kv_blocks import BlockLedger, Checkpoint, evict, parts_that_fit
from engine.ops import FusedSampling
from engine.sampling import Chosen, Sampler, SampleSpan, SamplingState


@dataclass(frozen=True, slots=True)
class Question:
    """The model's choice after the committed tokens of a request and ``ahead``, and after each of ``drafts`` there.

    0 ............ committed_len ............ + len(ahead) ............ + len(drafts)
    |              | taken as given           | verified one by one     |
                                           ^ answers: len(drafts) + 1 tokens, for the positions after these
    """

    request_id: str
    ahead: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()


@dataclass(slots=True)
class _ModelSession:
    token_ids: list[int]  # committed, as the target counts them
    own_ids: list[int]  # the same text in the model's tokens; the same list where they are the target's
    state: SamplingState
    is_readable: bool  # the embedding has a row for each of them
    salt: str  # of the cache
    checkpoint: Checkpoint | None = None  # computed, and not known to be committed
    num_promised: int = 0  # of a branch: blocks that it had not taken yet when it was forked


class SmallModel:
    """Not thread-safe.

    In the ledger, positions 0 .. computed_len of a request are committed, and an open checkpoint holds what was computed
    beyond. Before each pass the checkpoint is cut back to the common prefix with the tokens at hand, so a confirmed draft is
    never recomputed. When blocks run out, the least recently queried request loses its cache and is recomputed later.
    A request with a token beyond the model's embedding, which a target may have, must not be queried (``can_read``).
    Callers name the target's tokens; the ledger and the passes have the model's own (``vocabulary``).

    Args:
        num_blocks: of the KV cache.
        vocab_size: of the target; tokens that may be chosen.
        max_pass_rows: maximum tokens of a pass that only catches up.
        output_ids: the ascending token ids of a reduced head's logits (on the CPU, int64); None: all.
        vocabulary: of a model with another tokenizer than the target's.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        num_blocks: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_pass_rows: int = 512,
        output_ids: torch.Tensor | None = None,
        vocabulary: OtherVocabulary | None = None,
    ) -> None:
        self._model = model
        self._cache = model.new_cache(num_blocks)
        self.warm_up()
        self._ledger = BlockLedger(num_blocks, self._cache.block_len)
        self._vocabulary, self._columns = vocabulary, None
        num_tokens = min(vocab_size, model.config.vocab_size)
        if vocabulary is not None:
            num_tokens, output_ids = vocab_size, vocabulary.output_ids
            self._columns = vocabulary.columns.to(model.device)
        kernel = model.ops.gumbel_argmax(np.arange(num_tokens) if output_ids is None else output_ids.numpy())
        if isinstance(kernel, FusedSampling):
            kernel.warm_up(torch.float32, model.device)
        self._sampler = Sampler(num_tokens, eos_token_ids, kernel if output_ids is None else None)
        self._head = None
        if output_ids is not None:
            self._head = ReducedHead(output_ids.to(model.device), num_tokens, self._sampler, kernel)
        self._max_pass_rows = max_pass_rows
        self._num_known = model.config.vocab_size
        self._sessions: OrderedDict[str, _ModelSession] = OrderedDict()  # least recently queried first
        self._num_promised = 0  # to all branches
        self.num_passes = 0
        self.num_rows = 0
        self.num_lost = 0  # evicted caches

    def warm_up(self) -> None:
        """On a GPU records the small passes in the lane of the calling thread."""
        self._model.warm_up(self._cache)

    @property
    def max_len(self) -> int:
        return min(self._model.config.max_len, self._ledger.num_blocks * self._ledger.block_len)

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        """Follows a request; a followed one is reset, keeping the shared prefix of its cache."""
        self.release(request_id)
        known = sampling.known_to(self._sampler.vocab_size)  # the target may have ids that this model has not
        is_readable = known is not None and len(self.readable(token_ids)) == len(token_ids)
        committed = list(token_ids)
        own_ids = committed if self._vocabulary is None else list(self._own(token_ids))
        state = SamplingState(known or sampling, token_ids, prompt_len)
        self._sessions[request_id] = _ModelSession(committed, own_ids, state, is_readable, salt)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        session = self._sessions[request_id]
        session.token_ids.extend(token_ids)
        if session.own_ids is not session.token_ids:
            session.own_ids.extend(self._own(token_ids))
        session.state.extend(token_ids)
        session.is_readable &= len(self.readable(token_ids)) == len(token_ids)

    def opening(self, request_id: str) -> tuple[tuple[int, ...], int, SamplingParams, str]:
        """Arguments of `open` for the request as it is now: tokens, prompt length, sampling, salt."""
        session = self._sessions[request_id]
        return tuple(session.token_ids), session.state.prompt_len, session.state.sampling, session.salt

    def release(self, request_id: str) -> None:
        session = self._sessions.pop(request_id, None)
        if session is not None:
            self._num_promised -= session.num_promised
            if request_id in self._ledger:
                self._ledger.release(request_id)

    def readable(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens before the first that the model cannot read."""
        if self._vocabulary is None:
            return tuple(takewhile(lambda token_id: token_id < self._num_known, token_ids))
        return tuple(takewhile(lambda token_id: self._own((token_id,)), token_ids))

    def choosable(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens before the first that the model cannot read, or spells with several of its own."""
        if self._vocabulary is None:
            return self.readable(token_ids)
        return tuple(takewhile(lambda token_id: len(self._own((token_id,))) == 1, token_ids))

    def can_read(self, request_id: str, ahead: Sequence[int]) -> bool:
        """Whether the model can read every token of the request and of ``ahead``."""
        return self._sessions[request_id].is_readable and len(self.readable(ahead)) == len(ahead)

    def committed_len(self, request_id: str) -> int:
        """In the model's tokens."""
        return len(self._sessions[request_id].own_ids)

    def ends(self, request_id: str, token_id: int) -> bool:
        sampling = self._sessions[request_id].state.sampling
        ends = token_id in self._sampler.eos_token_ids and not sampling.ignore_eos
        return ends or token_id in sampling.stop_token_ids

    def parts(self, wanted: Sequence[tuple[Question, int]]) -> Iterator[list[int]]:
        """Divides questions about distinct requests, with the maximum tokens beyond ``ahead``, into parts that the cache
        holds at once, and makes room for each in turn. Yields indices, except of questions beyond ``max_len``."""
        wanted = [(self._in_own(question), num_tokens) for question, num_tokens in wanted]
        lens = [self._given_len(question) + num_tokens for question, num_tokens in wanted]
        fitting = [i for i, length in enumerate(lens) if length <= self.max_len]
        for part in parts_that_fit(fitting, lambda i: lens[i], self._ledger):
            self._make_room([wanted[i] for i in part])
            yield part

    def catch_up(self, questions: Sequence[Question]) -> list[bool]:
        """Computes what is missing before the questions, in one pass of at most ``max_pass_rows``, least missing first.
        Returns whether each question can now be answered without another such pass."""
        questions = [self._in_own(question) for question in questions]
        missing = [self._align(question) for question in questions]
        if sum(missing) <= self._max_pass_rows:
            return [True] * len(questions)  # choose computes them in the pass of the answers
        self._catch_up_pass(questions, missing, sorted(range(len(questions)), key=missing.__getitem__))
        self._model.synchronize()  # nothing is read back, and callers time this
        return [num_missing == 0 for num_missing in missing]

    def choose_within(self, questions: Sequence[Question], max_rows: int) -> list[Chosen | None]:
        """As ``choose``, in one pass of at most ``max_rows`` rows, or of the longest question's, in free blocks only. None:
        only part of the tokens before the question was computed. No tokens: no free blocks."""
        found: list[Chosen | None] = [None] * len(questions)
        ready: list[int] = []
        catching_up: tuple[Question, int] | None = None
        rows_left, blocks_left = max_rows, self._ledger.num_free_blocks
        for i, question in enumerate(map(self._in_own, questions)):
            request_id = question.request_id
            missing = self._align(question)
            end_len = self._given_len(question) + len(question.drafts)
            needed = self._ledger.num_blocks_needed(request_id, end_len - self._ledger.computed_len(request_id))
            if end_len > self.max_len or needed > blocks_left or not self.can_read(request_id, questions[i].drafts):
                found[i] = Chosen(())
            elif missing + len(question.drafts) < rows_left:
                ready.append(i)
                rows_left -= missing + 1 + len(question.drafts)
                blocks_left -= needed
            elif missing and catching_up is None:
                catching_up = question, min(missing, max_rows)
        if ready:
            for i, chosen in zip(ready, self.choose([questions[i] for i in ready]), strict=True):
                found[i] = chosen
        elif catching_up is not None:
            self._forward([self._compute(*catching_up)])
            self._model.synchronize()
        return found

    def fork(self, request_id: str, branch_id: str, ahead: Sequence[int], num_more: int) -> bool:
        """Follows ``request_id`` a second time, as ``branch_id``, to draft ``num_more`` tokens after ``ahead``. It shares
        full blocks and copies what was computed beyond them. Returns whether enough blocks are free and not promised to
        other branches; otherwise it does not exist.
        A branch ends with ``adopt`` or ``release``, before its request is reset or released."""
        session, ledger = self._sessions[request_id], self._ledger
        if session.checkpoint is not None:  # so that its full blocks can be shared
            base_len, computed = ledger.computed_len(request_id), session.checkpoint.token_ids
            num_final = common_prefix_len(computed, session.own_ids[base_len:-1])
            if 0 < num_final < len(computed):
                session.checkpoint = ledger.commit_some(session.checkpoint, num_final)
        block_len, given = ledger.block_len, (*session.own_ids, *self._own(ahead))
        end_len = len(given) + num_more
        if end_len > self.max_len:
            return False
        # The index may have more full blocks than the request, or lack some: those of an equal prefix that were evicted.
        start = ledger.open(branch_id, session.own_ids, session.salt)
        needed = -(-end_len // block_len) - start // block_len
        if needed > ledger.num_free_blocks - self._num_promised:
            ledger.release(branch_id)
            return False
        branch = replace(session, checkpoint=None, num_promised=0)
        self._sessions[branch_id] = branch
        base_len = ledger.computed_len(request_id) if request_id in ledger else 0
        before = () if session.checkpoint is None else session.checkpoint.token_ids
        copied = given[start : base_len + common_prefix_len(before, given[base_len:])]
        if copied:
            branch.checkpoint = ledger.speculate(branch_id, copied)
            targets = ledger.block_table(branch_id)[start // block_len :]
            sources = ledger.block_table(request_id)[start // block_len :][: len(targets)]
            self._cache.copy_blocks(sources, targets)
            needed -= len(targets)
        branch.num_promised = needed
        self._num_promised += needed
        return True

    def adopt(self, request_id: str, branch_id: str) -> None:
        """The request goes on with the cache of its branch, which ends. Call it after ``extend``."""
        self._num_promised -= self._sessions.pop(branch_id).num_promised
        if branch_id in self._ledger:
            if request_id in self._ledger:
                self._ledger.release(request_id)
            self._sessions[request_id].checkpoint = self._ledger.move(branch_id, request_id)

    def choose(
        self,
        questions: Sequence[Question],
        num_runners_up: int = 0,
        watched: Sequence[tuple[int, Callable[[torch.Tensor], None]]] = (),
    ) -> list[Chosen]:
        """One packed pass for all questions, which are about distinct requests and must fit the cache (``parts``).

        Args:
            num_runners_up: of each position: the tokens that would be chosen if those before were masked, best first.
            watched: index of a question, and what is told the distributions of its answers before this waits for choices.
        """
        spans_to_sample = [
            SampleSpan(self._sessions[q.request_id].state, q.ahead + q.drafts, len(q.drafts) + 1) for q in questions
        ]
        lens_of_drafts = [[len(self._own((token_id,))) for token_id in question.drafts] for question in questions]
        questions = [self._in_own(question) for question in questions]
        missing = [self._align(question) for question in questions]
        while sum(missing) > self._max_pass_rows:
            self._catch_up_pass(questions, missing, range(len(questions)))
        lens = [num_missing + 1 + len(question.drafts) for num_missing, question in zip(missing, questions, strict=True)]
        hidden = self._forward([self._compute(question, n) for question, n in zip(questions, lens, strict=True)])
        answers = zip(lens_of_drafts, accumulate(lens), strict=True)
        answered = np.concatenate([end - 1 - sum(of) + np.cumsum([0, *of]) for of, end in answers])  # the last row of each
        logits = self._model.logits(hidden if len(answered) == len(hidden) else hidden[to_device(answered, hidden.device)])
        if self._columns is not None:
            logits = logits.index_select(1, self._columns)
        for i, note in watched:
            start = sum([span.num_rows for span in spans_to_sample[:i]])
            note(self._distributions(logits[start : start + spans_to_sample[i].num_rows], spans_to_sample[i].state))
        chosen = self._choose(logits, spans_to_sample)
        return self._with_runners_up(logits, spans_to_sample, chosen, num_runners_up) if num_runners_up else chosen

    def _choose(self, logits: torch.Tensor, spans: Sequence[SampleSpan]) -> list[Chosen]:
        if self._head is not None:
            return self._head.choose(logits, spans)
        return self._sampler.choose(logits, spans, want_confidences=True)

    @torch.inference_mode()
    def _distributions(self, logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
        """[rows, vocab], at the request's temperature, 1 for greedy ones, before penalties and filters."""
        whole = logits[:, : self._sampler.vocab_size] if self._head is None else self._head.scatter(logits)
        return (whole.float() / (state.sampling.temperature or 1.0)).softmax(-1)

    @torch.inference_mode()
    def _with_runners_up(
        self, logits: torch.Tensor, spans: Sequence[SampleSpan], chosen: Sequence[Chosen], num: int
    ) -> list[Chosen]:
        """With the noise of each position; where it cannot choose ``num`` times, there are fewer. Overwrites the logits."""
        found: list[list[tuple[int, ...]]] = [[() for _ in one.token_ids] for one in chosen]
        last: Sequence[Chosen] = chosen
        for _ in range(num):
            row = 0
            for span, one in zip(spans, last, strict=True):
                token_ids = np.array(one.token_ids, np.int64)
                columns = token_ids if self._head is None else self._head.columns(token_ids)
                rows = np.arange(row, row + len(columns))
                logits[to_device(rows, logits.device), to_device(columns, logits.device)] = -torch.inf
                row += span.num_rows
            last = self._choose(logits, spans)
            for ranked, one in zip(found, last, strict=True):
                for i, token_id in enumerate(one.token_ids[: len(ranked)]):
                    ranked[i] = (*ranked[i], token_id)
        return [replace(one, runners_up=tuple(ranked)) for one, ranked in zip(chosen, found, strict=True)]

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
        num_followed = sum(key in self._ledger for key in self._sessions)
        assert self._ledger.num_sequences == num_followed, "an ended request or branch holds blocks"
        num_promised = sum(session.num_promised for session in self._sessions.values())
        assert self._num_promised == num_promised, "blocks are promised to an ended branch"
        for request_id, session in self._sessions.items():
            assert len(session.state) == len(session.token_ids), f"{request_id!r}: sampling state out of step"
            if request_id in self._ledger:
                computed_len = self._ledger.computed_len(request_id)
                assert computed_len < len(session.own_ids), f"{request_id!r}: the last token's row is needed again"
            else:
                assert session.checkpoint is None, f"{request_id!r}: a checkpoint without blocks"

    def _own(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(token_ids) if self._vocabulary is None else self._vocabulary.own(token_ids)

    def _in_own(self, question: Question) -> Question:
        """With the model's tokens."""
        if self._vocabulary is None:
            return question
        return Question(question.request_id, self._own(question.ahead), self._own(question.drafts))

    def _given_len(self, question: Question) -> int:
        return self.committed_len(question.request_id) + len(question.ahead)

    def _make_room(self, part: Sequence[tuple[Question, int]]) -> None:
        """Evicts caches of requests outside ``part``, least recently queried first, until it fits."""
        needed = 0
        for question, num_tokens in part:
            self._sessions.move_to_end(question.request_id)
            self._align(question)
            missing = self._given_len(question) + num_tokens - self._ledger.computed_len(question.request_id)
            needed += self._ledger.num_blocks_needed(question.request_id, missing)
        for request_id in evict(self._ledger, self._sessions, needed, {question.request_id for question, _ in part}):
            self._sessions[request_id].checkpoint = None
            self.num_lost += 1

    def _align(self, question: Question) -> int:
        """Cuts the cache back to the common prefix with the tokens before the question, except the last, whose row answers.
        Returns the number of missing tokens between."""
        request_id = question.request_id
        session = self._sessions[request_id]
        if request_id not in self._ledger:
            self._ledger.open(request_id, session.own_ids, session.salt)
        base_len = self._ledger.computed_len(request_id)
        num_given = self._given_len(question) - 1 - base_len
        checkpoint = session.checkpoint
        if checkpoint is None:
            return num_given
        num_final = len(session.own_ids) - 1 - base_len
        num_agreed = common_prefix_len(checkpoint.token_ids, (*session.own_ids[base_len:], *question.ahead)[:num_given])
        if num_agreed <= num_final:
            self._ledger.commit(checkpoint, num_agreed)
            session.checkpoint = None
        elif num_agreed < len(checkpoint.token_ids):
            session.checkpoint = self._ledger.revise(checkpoint, checkpoint.token_ids[:num_agreed])
        return num_given - num_agreed

    def _compute(self, question: Question, num_rows: int) -> PackedSpan:
        """Reserves blocks for the next ``num_rows`` tokens of a question."""
        request_id = question.request_id
        session = self._sessions[request_id]
        final_len = self._ledger.computed_len(request_id)
        before = () if session.checkpoint is None else session.checkpoint.token_ids
        base_len = final_len + len(before)
        given = (*session.own_ids[base_len:], *question.ahead, *question.drafts)
        skipped = max(0, base_len - len(session.own_ids))
        token_ids = given[skipped : skipped + num_rows]
        if session.checkpoint is None:
            session.checkpoint = self._ledger.speculate(request_id, token_ids)
        else:
            session.checkpoint = self._ledger.revise(session.checkpoint, before + token_ids)
        return PackedSpan(base_len, token_ids, self._ledger.block_table(request_id))

    def _catch_up_pass(self, questions: Sequence[Question], missing: list[int], order: Iterable[int]) -> None:
        """One pass of at most ``max_pass_rows`` missing rows, in this order; subtracts them from ``missing``."""
        rows_left, spans = self._max_pass_rows, []
        for i in order:
            num_rows = min(missing[i], rows_left)
            if num_rows:
                spans.append(self._compute(questions[i], num_rows))
                missing[i] -= num_rows
                rows_left -= num_rows
        self._forward(spans)

    def _forward(self, spans: Sequence[PackedSpan]) -> torch.Tensor:
        self.num_passes += 1
        self.num_rows += sum(len(span.token_ids) for span in spans)
        return self._model.forward(spans, self._cache)
