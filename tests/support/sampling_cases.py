"""Random sampling parameters with a history and drafts."""

from hypothesis import strategies as st

from cluster.sampling_params import SamplingParams


def states(vocab_size: int) -> st.SearchStrategy[tuple[SamplingParams, list[int], int, tuple[int, ...], int]]:
    """Parameters, prompt and output, prompt length, drafts, and how many rows to sample."""
    token_id = st.integers(0, vocab_size - 1)
    biases = st.dictionaries(token_id, st.floats(-5, 5, width=16), max_size=3).map(lambda bias: tuple(bias.items()))
    sampling = st.builds(
        SamplingParams,
        max_tokens=st.just(64),
        temperature=st.sampled_from([0.0, 1e-9, 0.3, 0.8, 1.0, 2.0]),
        top_k=st.none() | st.integers(1, vocab_size + 3),
        top_p=st.just(1.0) | st.floats(0.01, 1.0),
        min_p=st.just(0.0) | st.floats(0.0, 1.0),
        repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
        presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.25, -1.0]),
        logit_bias=st.just(()) | biases,
        stop_token_ids=st.just(()) | st.lists(token_id, max_size=2).map(tuple),
        allowed_token_ids=st.just(()) | st.lists(token_id, max_size=4).map(tuple),
        bad_words=st.just(()) | st.lists(st.lists(token_id, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        min_tokens=st.integers(0, 8),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 2**64 - 1),
    )
    tokens = st.lists(token_id, min_size=1, max_size=8)
    drafts = st.lists(token_id, max_size=4).map(tuple)
    return st.tuples(sampling, tokens, st.integers(1, 8), drafts, st.integers(1, 5)).map(
        lambda s: (s[0], s[1], min(s[2], len(s[1])), s[3], min(s[4], len(s[3]) + 1))
    )
