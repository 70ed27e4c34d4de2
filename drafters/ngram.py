"""Prompt lookup: copies what followed the last few tokens at their last occurrence in the request's own text.

The method is prompt lookup decoding (A. Saxena, 2023; LLMA, arXiv 2304.04487, for reference texts). No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.sampling_params import SamplingParams
from drafters.protocol import Capabilities, Demand, Draft

_NUM_PLACES = 4  # positions in a draft with hit rates of their own; later ones share the last
_FIRST_PRIOR, _LATER_PRIOR = 0.3, 0.8
_MEMORY = 500.0  # trials


@dataclass(slots=True)
class HitRate:
    """A decayed rate with a prior of ``weight`` trials, and without numpy."""

    value: float
    weight: float = 8.0

    def record(self, hit: bool) -> None:
        self.weight = min(self.weight + 1.0, _MEMORY)
        self.value += (float(hit) - self.value) / self.weight


_Guess = tuple[int, HitRate | None]  # a token, and its hit rate if it was drafted here


class _NgramText:
    """The tokens of one request, and the position after the last occurrence of each n-gram of a length in ``match_lens``,
    the longest first. An n-gram is indexed when its next token comes, so the end of the text never finds itself.
    """

    def __init__(self, token_ids: Sequence[int], match_lens: range) -> None:
        self.token_ids: list[int] = []
        self.guesses: list[_Guess] = []  # drafted beyond the text
        self._lens = match_lens
        self._next: dict[tuple[int, ...], int] = {}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        text, index = self.token_ids, self._next
        for token_id in token_ids:
            end = len(text)
            for n in self._lens:
                if n <= end:
                    index[tuple(text[end - n :])] = end
            text.append(token_id)

    def find(self, ahead: Sequence[int]) -> tuple[int, int] | None:
        """(length, position after the earlier occurrence) of the longest match of the end of the text and ``ahead``."""
        longest = self._lens[0]
        tail = [*self.token_ids[-longest:], *ahead][-longest:]
        for n in self._lens:
            if n <= len(tail):
                position = self._next.get(tuple(tail[-n:]))
                if position is not None:
                    return n, position
        return None

    def check_integrity(self) -> None:
        for ngram, position in self._next.items():
            assert tuple(self.token_ids[position - len(ngram) : position]) == ngram, f"{ngram} does not end at {position}"


class NgramDrafter:
    """Copies what followed the last ``max_match_len`` down to ``min_match_len`` tokens at their last joint occurrence.

    A copy that reaches the end of the text continues in itself, so a loop is drafted at any length. The confidence of a
    token is the hit rate of its match length and position in the draft, over all requests. Memory: about 150 bytes per match
    length and token of the followed requests.
    """

    kind = "ngram"
    capabilities = Capabilities()

    def __init__(self, max_match_len: int = 4, min_match_len: int = 1) -> None:
        self.settings = (max_match_len, min_match_len)
        self._match_lens = range(max_match_len, min_match_len - 1, -1)
        self._rates = {
            (match_len, place): HitRate(_LATER_PRIOR if place else _FIRST_PRIOR)
            for match_len in self._match_lens
            for place in range(_NUM_PLACES)
        }
        self._texts: dict[str, _NgramText] = {}

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self._texts[request_id] = _NgramText(token_ids, self._match_lens)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Every committed token at a drafted position is a trial, up to the first wrong one."""
        text = self._texts[request_id]
        for token_id, (guessed, rate) in zip(token_ids, text.guesses, strict=False):
            if rate is not None:
                rate.record(token_id == guessed)
            if token_id != guessed:
                text.guesses.clear()
                break
        del text.guesses[: len(token_ids)]
        text.extend(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return [self._draft(demand) for demand in demands]

    def release(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def check_integrity(self) -> None:
        for text in self._texts.values():
            text.check_integrity()

    def _draft(self, demand: Demand) -> Draft:
        text = self._texts[demand.request_id]
        match = text.find(demand.ahead)
        if match is None or demand.num_tokens <= 0:
            return Draft(demand.request_id, (), ())
        match_len, position = match
        source = [*text.token_ids[position : position + demand.num_tokens]]
        if len(source) < demand.num_tokens:
            source += demand.ahead
            period = len(source)  # at least one: an n-gram is indexed when a token follows it
            source = [source[i % period] for i in range(demand.num_tokens)]
        rates = [self._rates[match_len, 0]]
        survival = rates[0].value
        for place in range(1, demand.num_tokens):
            rate = self._rates[match_len, min(place, _NUM_PLACES - 1)]
            survival *= rate.value
            if survival < demand.terms.least_survival:
                break
            rates.append(rate)
        token_ids = tuple(source[: len(rates)])
        before: list[_Guess] = [(token_id, None) for token_id in demand.ahead]
        for i, guess in enumerate(text.guesses[: len(before)]):
            if guess[0] == before[i][0]:
                before[i] = guess
        text.guesses = [*before, *zip(token_ids, rates, strict=True)]
        return Draft(demand.request_id, token_ids, tuple(rate.value for rate in rates))
