"""Tokens of simulated requests: every request, prompt and answer, is the beginning of one text."""

from dataclasses import dataclass

from simulator.agreement import MAX_DRAFT_LEN, SimulatedRequest

VOCAB_SIZE = 1024
EOS = 0


class AnswerText:
    """Token t of every request is ``ids[t]``, and ``ids[t + 1]`` stands for a wrong token there. Neither is EOS."""

    def __init__(self) -> None:
        self.ids: tuple[int, ...] = ()

    def reach(self, length: int) -> None:
        """Makes the text long enough for requests of ``length`` tokens and drafts behind them."""
        if len(self.ids) <= length + MAX_DRAFT_LEN:
            self.ids = tuple(1 + t % (VOCAB_SIZE - 1) for t in range(2 * (length + MAX_DRAFT_LEN)))


@dataclass(slots=True, eq=False)
class Script:
    """What is known beforehand of one request."""

    request: SimulatedRequest
    text: AnswerText
    end_len: int  # of prompt and answer
    ends_early: bool  # by EOS, before ``max_tokens``

    @classmethod
    def of(cls, request: SimulatedRequest, text: AnswerText) -> "Script":
        end_len = request.prompt_len + request.output_len
        text.reach(end_len)
        return cls(request, text, end_len, request.output_len < request.max_tokens)

    def tokens(self, start: int, num: int) -> tuple[int, ...]:
        """The right tokens at positions ``start`` .. ``start + num``, prompt included; fewer at the end of the answer."""
        end = start + num
        if end < self.end_len:
            return self.text.ids[start:end]
        if self.ends_early and start < self.end_len:
            return (*self.text.ids[start : self.end_len - 1], EOS)
        return self.text.ids[start : self.end_len]

    def draft(self, start: int, num: int, num_right: int) -> tuple[int, ...]:
        """``num`` tokens of which the first ``num_right`` are right."""
        if num == num_right:
            return self.tokens(start, num)
        return self.tokens(start, num_right) + self.text.ids[start + num_right + 1 : start + num + 1]

    def runners_up(self, start: int, num: int, num_right: int, num_wanted: int, rank: int) -> tuple[tuple[int, ...], ...]:
        """Other choices at each token of ``draft``; at the first wrong one, that of ``rank`` is right."""
        ids, found = self.text.ids, []
        for i in range(num):
            others = list(ids[start + i + 2 : start + i + 2 + num_wanted])
            if i == num_right and 1 <= rank <= num_wanted:
                others[rank - 1] = (*self.tokens(start + i, 1), EOS)[0]
            found.append(tuple(others))
        return tuple(found)
