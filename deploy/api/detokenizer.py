"""Token by token into text, never half a character."""

import codecs

from deploy.api.tokenizer import Tokenizer


class Detokenizer:
    """Feeds of any size, concatenated with ``flush``, equal ``Tokenizer.decode`` of all tokens. Linear in their bytes.

    A character whose bytes are spread over several tokens comes out with the last of them. Bytes that can begin no
    character come out as U+FFFD at once; an unfinished character does so in ``flush`` alone, when no more can come.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes if skip_special_tokens else tokenizer.all_token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
