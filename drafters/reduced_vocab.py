"""Sampling with a reduced head by the target's rule and noise.

A fused kernel samples from the head's tokens alone, any other one so for requests with no other sampling parameter than a
temperature. Otherwise the logits are scattered over the whole vocabulary, and the target's sampler chooses.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.ops import FusedSampling, GumbelArgmax
from engine.sampling import Chosen, Picks, Sampler, SampleSpan, chosen_of, keys_of, place, temperatures_of


class WholeVocabulary:
    """Scatters logits of ``token_ids``, int64 on their device, over the whole vocabulary, -inf elsewhere."""

    def __init__(self, token_ids: Tensor, vocab_size: int) -> None:
        self._token_ids = token_ids
        self._logits = torch.empty(0, vocab_size, device=token_ids.device)

    @torch.inference_mode()
    def scatter(self, logits: Tensor) -> Tensor:
        """[rows, len(token_ids)] -> [rows, vocab_size], overwritten by the next call."""
        if len(self._logits) < len(logits) or self._logits.dtype != logits.dtype:
            self._logits = logits.new_full((2 * len(logits), self._logits.shape[1]), -torch.inf)
        return self._logits[: len(logits)].index_copy_(1, self._token_ids, logits)


class ReducedHead:
    """A head over ``token_ids``, ascending int64 on the device of its logits, of ``vocab_size``. ``kernel`` chooses among
    them; None: the sampler always chooses."""

    def __init__(self, token_ids: Tensor, vocab_size: int, sampler: Sampler, kernel: GumbelArgmax | None) -> None:
        self._ids = token_ids.cpu().numpy()
        self._whole = WholeVocabulary(token_ids, vocab_size)
        self._sampler = sampler
        self._kernel = kernel
        self._fused: Sampler | None = None
        if isinstance(kernel, FusedSampling):
            self._fused = Sampler(sampler.vocab_size, sampler.eos_token_ids, kernel, self._ids.tolist())

    def columns(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of its logits."""
        return np.searchsorted(self._ids, token_ids)

    def scatter(self, logits: Tensor) -> Tensor:
        """As ``WholeVocabulary.scatter``."""
        return self._whole.scatter(logits)

    @torch.inference_mode()
    def choose(self, logits: Tensor, spans: Sequence[SampleSpan]) -> list[Chosen]:
        """As ``Sampler.choose`` with confidences; ``logits`` [rows, len(token_ids)]."""
        if self._fused is not None:
            return self._fused.choose(logits, spans, want_confidences=True)
        if self._kernel is None or not all(span.state.is_plain for span in spans):
            return self._sampler.choose(self._whole.scatter(logits), spans, want_confidences=True)
        place(spans)
        keys, temperatures = keys_of(spans), temperatures_of(spans)
        token_ids, highest = self._kernel(logits, keys, temperatures)
        divisors = torch.from_numpy(np.where(temperatures > 0.0, temperatures, np.float32(1.0)))
        columns = torch.from_numpy(self.columns(token_ids))
        probabilities = (logits.float() / divisors[:, None]).softmax(-1)
        confidences = probabilities.gather(1, columns[:, None]).squeeze(1).double().numpy()
        return chosen_of(spans, Picks(token_ids, highest.astype(np.float64), confidences), {})
