"""What each rank of a target holds, and that all of them together compute and choose what one does."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cluster.errors import InvalidField, RankLost
from cluster.messages import Open
from cluster.sampling_params import Grammar, GrammarKind, SamplingParams
from engine.batch_layout import PackedSpan
from engine.cpu import build
from engine.cpu.gumbel_argmax import CpuGumbelArgmax
from engine.factory import load_model, load_target
from engine.forward import CausalModel
from engine.models.config import load_config
from engine.models.int8 import stored
from engine.models.weights import LinearWeight, SafetensorsFolder, open_weights
from engine.sampling import Chosen, Sampler, SampleSpan, SamplingState
from engine.tensor_parallel.group import GlooRanks, NcclRanks
from engine.tensor_parallel.rounds import Follower, LeadingTarget, RankChange, RankRound, decode, encode
from engine.tensor_parallel.sampling import ShardedSampler
from engine.tensor_parallel.sharding import shard_of, split
from router.plan import Span
from tests.support.compiler import needs_compiler
from tests.support.families import write_family
from tests.support.requests import a_request
from tests.support.sampling_cases import states
from tests.support.target_driver import play
from tests.support.thread_ranks import ThreadRanks, thread_ranks
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow  # together they take seconds


@pytest.fixture(scope="module", params=[2, 3])
def group(request: pytest.FixtureRequest) -> Iterator[ThreadRanks]:
    with thread_ranks(request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV groups of three query heads, as SmolLM2-135M's."""
    shape = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 200}
    return write_tiny_model(tmp_path_factory.mktemp("uneven") / "model", **shape)


@given(num=st.integers(1, 5000), num_parts=st.integers(1, 9), unit=st.sampled_from([1, 2, 64]))
def test_parts_are_whole_units_one_after_the_other(num: int, num_parts: int, unit: int) -> None:
    parts = split(num, num_parts, unit)
    assert [item for part in parts for item in part] == list(range(num))
    if num >= num_parts * unit:
        assert min(map(len, parts)) >= 1
        assert all(part.start % unit == 0 for part in parts)
        assert max(map(len, parts)) - min(map(len, parts)) < 2 * unit


def test_heads_are_split_by_whole_groups(uneven: Path) -> None:
    config = load_config(uneven)
    shards = [shard_of(config, rank, 2) for rank in range(2)]
    assert [shard.kv_heads for shard in shards] == [range(2), range(2, 3)]
    assert [shard.heads for shard in shards] == [range(6), range(6, 9)]
    assert [(own.num_heads, own.num_kv_heads) for own in (shard.config_of(config) for shard in shards)] == [(6, 2), (3, 1)]
    assert [shard.columns for shard in shards] == [range(104), range(104, 200)]  # in eights, which divide 200
    assert [shard.token_ids for shard in shards] == [range(129), range(129, 257)]


def test_more_ranks_than_key_value_heads_are_refused(uneven: Path) -> None:
    with pytest.raises(InvalidField, match=r"target\.tensor_parallel: must be at most 3, the key-value heads .* got 4"):
        shard_of(load_config(uneven), 0, 4)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_read_parts_that_make_up_the_whole(kind: str, num_ranks: int, uneven: Path, tmp_path: Path) -> None:
    for file in uneven.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = stored(load_file(uneven / "model.safetensors"), kind, lambda name: name.endswith("o_proj.weight"))  # type: ignore[arg-type]
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_config(tmp_path)
    with open_weights(tmp_path, config, torch.float32) as whole:
        table, layers = whole.embedding(), list(whole.layers())
    shards = [shard_of(config, rank, num_ranks) for rank in range(num_ranks)]
    tables, by_rank = [], []
    for shard in shards:
        with open_weights(tmp_path, config, torch.float32, shard) as weights:
            tables.append(weights.embedding())
            by_rank.append(list(weights.layers()))
    assert torch.equal(torch.cat(tables), table)
    for layer, parts in zip(layers, zip(*by_rank, strict=True), strict=True):
        assert torch.equal(torch.cat([part.out.weight for part in parts], 1), layer.out.weight)
        assert torch.equal(torch.cat([part.down.weight for part in parts], 1), layer.down.weight)
        assert torch.equal(_joined([part.gate_up for part in parts], 2), layer.gate_up.weight)
        queries = [part.qkv.weight[: len(shard.heads) * config.head_dim] for part, shard in zip(parts, shards, strict=True)]
        assert torch.equal(torch.cat(queries), layer.qkv.weight[: config.q_size])


def _joined(weights: list[LinearWeight], num_fused: int) -> torch.Tensor:
    """Rows of matrices that are fused: all ranks' parts of the first, then of the second."""
    fused = [weight.weight.chunk(num_fused) for weight in weights]
    return torch.cat([part[i] for i in range(num_fused) for part in fused])


def test_a_rank_reads_no_tensor_that_is_split_as_a_whole(uneven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, read = load_config(uneven), []
    original = SafetensorsFolder.read

    def recording(self: SafetensorsFolder, name: str, *args: object) -> torch.Tensor:
        tensor = original(self, name, *args)  # type: ignore[arg-type]
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(SafetensorsFolder, "read", recording)
    whole = sum(tensor.numel() for tensor in load_file(uneven / "model.safetensors").values())
    for rank in range(3):
        read.clear()
        with open_weights(uneven, config, torch.float32, shard_of(config, rank, 3)) as weights:
            weights.embedding(), list(weights.layers()), weights.final_norm(), weights.head()
        assert sum(read) < 0.42 * whole


@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-biased", "llama-odd-sizes", "qwen2", "qwen3"])
def test_ranks_compute_what_one_does(family: str, tmp_path: Path) -> None:
    write_family(family, tmp_path)
    whole = load_model(tmp_path, "float32")
    hidden, logits = _forward(whole)
    with thread_ranks(2) as group:
        found = group.on_all(lambda ranks: _forward(load_model(tmp_path, "float32", ranks=ranks)))
    for own, _ in found:
        torch.testing.assert_close(own, hidden, atol=1e-4, rtol=1e-4)
        assert torch.equal(own, found[0][0]), "ranks disagree"
    torch.testing.assert_close(torch.cat([part for _, part in found], 1), logits, atol=1e-4, rtol=1e-4)


def _forward(model: CausalModel) -> tuple[torch.Tensor, torch.Tensor]:
    cache = model.new_cache(8, 32)
    first = PackedSpan(0, tuple(range(3, 40)), np.array([0, 1], np.int32))
    second = PackedSpan(0, tuple(range(200, 100, -3)), np.array([2, 3], np.int32))
    model.forward([first, second], cache)
    hidden = model.forward([PackedSpan(37, (5, 6), np.array([0, 1], np.int32))], cache)
    return hidden, model.logits(hidden)


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=needs_compiler)])
@given(data=st.data())
def test_the_choice_over_shards_is_the_whole_one(group: ThreadRanks, kernel: bool, data: st.DataObject) -> None:
    """For penalties, bias, masks, temperature, top-k, top-p, min-p and log-probabilities."""
    vocab_size = data.draw(st.sampled_from([200, 257, 1000]))
    requests = data.draw(st.lists(states(vocab_size), min_size=1, max_size=5))
    asks = [data.draw(st.sampled_from([None, None, 0, 3])) for _ in requests]
    spans = [
        SampleSpan(SamplingState(replace(s, top_logprobs=num_top), ids, n), drafts, rows)
        for (s, ids, n, drafts, rows), num_top in zip(requests, asks, strict=True)
    ]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = torch.randn(sum(span.num_rows for span in spans), vocab_size, generator=generator)
    logits *= data.draw(st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    if data.draw(st.booleans()):
        logits = logits.round(decimals=1)  # ties
    if data.draw(st.booleans()):
        logits[0, data.draw(st.integers(0, vocab_size - 1))] = torch.nan
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    logits = logits.to(dtype)
    eos = (vocab_size // 2,)

    raced = CpuGumbelArgmax(build.load_library(dtype), dtype, np.arange(vocab_size)) if kernel else None
    whole = Sampler(vocab_size, eos, raced)
    parts = split(vocab_size, len(group.ranks), 64)

    def choose(ranks: GlooRanks) -> list[Chosen]:
        own = parts[ranks.rank]
        sampler = ShardedSampler(whole, [len(part) for part in parts], ranks)
        return sampler.choose(logits[:, own.start : own.stop], spans)

    chosen = whole.choose(logits, spans)
    first, *others = group.on_all(choose)
    assert repr(first) == repr(chosen)  # NaN equals NaN in it
    for found in others:
        assert [one.token_ids for one in found] == [one.token_ids for one in chosen]
        assert [one.error is None for one in found] == [one.error is None for one in chosen]


def test_a_round_arrives_as_it_was_sent() -> None:
    sampling = SamplingParams(9, 0.7, top_k=3, logit_bias=((4, 1.5),), seed=2**63 + 5)
    sent = RankRound(
        (RankChange(release="a"), RankChange(open=Open("a", (1, 2, 3), 2, sampling)), RankChange(release="")),
        (Span.bound("a", 2, (3, 4, 5), 2), Span.bound("b", 0, (7, 8), samples=False)),
        (24, 30),
    )
    assert decode(encode(sent)) == sent
    assert decode(encode(RankRound(ends=True))) == RankRound(ends=True)


def test_a_rank_that_hangs_is_lost_after_the_deadline(uneven: Path) -> None:
    """It has joined and loads no round: the leader's first sum waits for it."""
    with thread_ranks(2, timeout_s=0.3) as group:
        models = group.on_all(lambda ranks: load_target(uneven, dtype="float32", kv_cache_bytes=2**22, ranks=ranks))
        leader = models[0]
        assert isinstance(leader, LeadingTarget)
        leader.open(a_request("a", (1, 2, 3), max_tokens=4), (1, 2, 3))
        with pytest.raises(RankLost, match=r"rank 0 of 2 lost another rank \(.*imed out.*\): send the request again"):
            leader.execute([Span.bound("a", 0, (1, 2, 3))])
        leader.check_integrity()


def test_rank_0_has_the_whole_embedding_for_drafters_in_its_process(uneven: Path) -> None:
    plain = load_model(uneven, "float32")
    with thread_ranks(2) as group:
        leader = group.on_all(lambda ranks: load_target(uneven, dtype="float32", kv_cache_bytes=2**22, ranks=ranks))[0]
        assert isinstance(leader, LeadingTarget)
        assert torch.equal(leader.embedding, plain.embedding)


def test_a_grammar_is_compiled_on_rank_0_alone(uneven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling may take longer than another rank waits for a sum. The others are not even sent it."""
    sampling = SamplingParams(24, 0.8, seed=5, grammar=Grammar(GrammarKind.REGEX, "[a-f]{100,200}"))
    asked, options = {"a": [1, 2, 3], "b": [4, 5, 6, 7]}, {"dtype": "float32", "kv_cache_bytes": 2**22}
    requests = {"a": sampling, "b": replace(sampling, grammar=None, ignore_eos=True)}
    plain = load_target(uneven, **options)  # type: ignore[arg-type]
    expected = play(plain, asked, requests).outputs
    with thread_ranks(2) as group:
        leader, other = group.on_all(lambda ranks: load_target(uneven, **options, ranks=ranks))  # type: ignore[arg-type]
        assert plain.grammars is not None
        assert leader.grammars is not None
        assert other.grammars is None
        following = group.submit(Follower(other, group.ranks[1]).run)
        sent, send = list[bytes](), group.ranks[0].send
        monkeypatch.setattr(group.ranks[0], "send", lambda message: (sent.append(message), send(message)))
        with closing(leader):
            assert play(leader, asked, requests).outputs == expected
        following.result()
    assert not any(b"regex" in message or b"[a-f]" in message for message in sent)
    assert len(set(expected["a"])) <= 6 < len(set(expected["b"]))


def test_what_nccl_says_is_told_whole_and_from_the_start() -> None:
    """Its last lines have the cause. It counts from the launch of a collective, long before the device reaches it."""
    told = "NCCL error in: a.cpp:1, unhandled cuda error. Run with DEBUG.\nLast error:\nCuda failure 2 'out of memory'"
    group = mock.Mock()
    nccl = mock.Mock(return_value=group, Options=mock.Mock)
    store, cpu = torch.distributed.HashStore(), torch.device("cpu")
    with mock.patch("torch.distributed.ProcessGroupNCCL", nccl, create=True), mock.patch("torch.cuda.set_device"):
        ranks = NcclRanks(store, 0, 1, "127.0.0.1", 1.0, cpu)
        assert group.allreduce.call_count == 1, "ranks that cannot communicate end the start"
        assert nccl.call_args.args[3]._timeout.total_seconds() >= 60
        group.allgather.side_effect = RuntimeError(told)
        with pytest.raises(RankLost, match=r"NCCL failed on rank 0 of 1: .* Last error: Cuda failure 2 'out of memory'"):
            ranks.gather(torch.ones(1))
        group.allreduce.side_effect = RuntimeError(told)
        with pytest.raises(RankLost, match="out of memory"):
            NcclRanks(torch.distributed.HashStore(), 0, 1, "127.0.0.1", 1.0, cpu)
