"""What `drafters/native/suffix.c` is held to, in Python: the most frequent continuation of the end of the text, in the
request itself and in recent answers."""

from collections import deque
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from cluster.sampling_params import SamplingParams
from drafters.protocol import Capabilities, Demand, Draft, salt_key
from tests.reference.suffix_automaton import ROOT, SuffixAutomaton

_NUM_SEGMENTS = 4  # of the shared memory, which drops one at a time
_MAX_SALTS = 256  # of a segment


class _Match(NamedTuple):
    """A match of the end of a text: its last ``match_len`` tokens are among the substrings of ``state``."""

    automaton: SuffixAutomaton
    state: int
    match_len: int


class _SuffixText:
    """A request: its tokens, and the automaton over the last of them."""

    def __init__(self, token_ids: Sequence[int], max_len: int, salt: int) -> None:
        self._max_len = max_len
        self.salt = salt
        self.opened_len = len(token_ids)
        self.token_ids = list(token_ids)
        self.automaton = SuffixAutomaton()
        self.automaton.extend(self.token_ids[-max_len // 2 :])

    def extend(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.automaton.extend(token_ids)
        if self.automaton.num_tokens > self._max_len:  # halved, so the cost per token is constant
            self.automaton = SuffixAutomaton()
            self.automaton.extend(self.token_ids[-self._max_len // 2 :])

    def match(self, ahead: Sequence[int]) -> _Match:
        """The earlier occurrence of the end of the text, which is the suffix link of the whole text, and ``ahead``."""
        state = self.automaton.suffix(self.automaton.last) or ROOT
        return _Match(self.automaton, *self.automaton.walk(state, self.automaton.substring_len(state), ahead))


class _Segment:
    """Finished answers. Those of each salt have a root of their own, so that no match leads from one to another."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.roots: dict[int, int] = {}  # by salt

    def has_room(self, num_tokens: int, salt: int, segment_len: int) -> bool:
        fits = self.automaton.num_tokens + num_tokens <= segment_len
        return fits and (salt in self.roots or len(self.roots) < _MAX_SALTS)

    def add(self, token_ids: Sequence[int], salt: int) -> None:
        if salt not in self.roots:
            self.roots[salt] = self.automaton.add_root() if self.roots else ROOT
        self.automaton.begin(self.roots[salt])
        self.automaton.extend(token_ids)


class _SharedMemory:
    """The last ``max_tokens`` tokens of finished answers, in segments: the oldest is dropped when the newest is full."""

    def __init__(self, max_tokens: int) -> None:
        self._segment_len = max_tokens // _NUM_SEGMENTS
        self._segments: deque[_Segment] = deque(maxlen=_NUM_SEGMENTS)

    def add(self, token_ids: Sequence[int], salt: int) -> None:
        for start in range(0, len(token_ids), self._segment_len) if self._segment_len else ():
            part = token_ids[start : start + self._segment_len]
            if not self._segments or not self._segments[-1].has_room(len(part), salt, self._segment_len):
                self._segments.append(_Segment())
            self._segments[-1].add(part, salt)

    def match(self, tail: Sequence[int], salt: int) -> _Match | None:
        """The longest suffix of ``tail`` in answers with the salt, in the newest segment that has it."""
        matches = [
            _longest_suffix(segment.automaton, segment.roots[salt], tail)
            for segment in reversed(self._segments)
            if salt in segment.roots
        ]
        return max(matches, key=attrgetter("match_len"), default=None)

    def check_integrity(self) -> None:
        for segment in self._segments:
            segment.automaton.check_integrity()
            assert segment.automaton.num_tokens <= self._segment_len, "a segment outgrew its bound"
            assert len(segment.roots) <= _MAX_SALTS, "a segment has too many salts"


def _longest_suffix(automaton: SuffixAutomaton, root: int, tail: Sequence[int]) -> _Match:
    """The longest suffix of ``tail`` that occurs, searched in increasingly long suffixes, since it is mostly short."""
    num = 2
    while True:
        state, match_len = automaton.walk(root, 0, tail[-num:])
        if match_len < num:
            return _Match(automaton, state, match_len)
        num *= 2


class SuffixDrafter:
    """Follows the most frequent continuation of the longest match, in the request's own text or in recent answers.

    A request reads recent answers with its own salt only. All together have ``max_shared_tokens``.

    A token's confidence is its share of the continuations, c / (total + doubt / match length): one occurrence after a short
    match means little. With the default doubt, confidences from 0.4 up agreed with the accepted share within 0.05 on
    SmolLM2-135M's answers. An automaton takes about 140 bytes per token of natural text, and at most 450.

    Args:
        max_match_len: maximum match length in other answers; a request's own text has none.
        max_shared_tokens: tokens remembered of finished answers.
        min_survival: a draft ends before the probability that all of it is right falls below this.
        request_tokens: a request remembers between half of this and all of it.
    """

    kind = "suffix"
    capabilities = Capabilities()

    def __init__(
        self,
        *,
        max_match_len: int,
        max_shared_tokens: int,
        min_match_len: int = 1,
        min_survival: float = 0.15,
        doubt: float = 2.0,
        request_tokens: int = 8192,
    ) -> None:
        self.settings = (max_match_len, max_shared_tokens, min_match_len, min_survival, doubt, request_tokens)
        self._min_match_len, self._max_match_len = min_match_len, max_match_len
        self._min_survival, self._doubt = min_survival, doubt
        self._request_tokens = request_tokens
        self._shared = _SharedMemory(max_shared_tokens)
        self._texts: dict[str, _SuffixText] = {}

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self._texts[request_id] = _SuffixText(token_ids, self._request_tokens, salt_key(salt))

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._texts[request_id].extend(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return [self._draft(demand) for demand in demands]

    def release(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._shared.add(text.token_ids[text.opened_len :], text.salt)  # a reopened one gave its former output before

    def check_integrity(self) -> None:
        self._shared.check_integrity()
        for text in self._texts.values():
            text.automaton.check_integrity()
            assert text.automaton.num_tokens <= self._request_tokens, "a text outgrew its bound"

    def _draft(self, demand: Demand) -> Draft:
        text = self._texts[demand.request_id]
        num_tail = self._max_match_len
        tail = [*text.token_ids[-num_tail:], *demand.ahead][-num_tail:]
        matches = (text.match(demand.ahead), self._shared.match(tail, text.salt))
        return max((self._follow(match, demand) for match in matches if match is not None), key=itemgetter(0))[1]

    def _follow(self, match: _Match, demand: Demand) -> tuple[float, Draft]:
        """The expected tokens of a draft behind a match, and the draft."""
        automaton, state, match_len = match
        token_ids: list[int] = []
        confidences: list[float] = []
        survival, expected_len, least = 1.0, 0.0, self._min_survival
        while len(token_ids) < demand.num_tokens and match_len >= self._min_match_len:
            token_id, follower, most, total = automaton.likeliest(state)
            if not total:  # at the end of a text: try a shorter match
                state = automaton.suffix(state) or ROOT
                match_len = automaton.substring_len(state)
                continue
            confidence = most / (total + self._doubt / match_len)
            survival *= confidence
            if survival < least:
                break
            least = max(self._min_survival, demand.terms.least_survival)  # of all but the first
            expected_len += survival
            token_ids.append(token_id)
            confidences.append(confidence)
            state, match_len = follower, match_len + 1
        return expected_len, Draft(demand.request_id, tuple(token_ids), tuple(confidences))
