"""DSpark checkpoints of the released format, and the network against the paper's equations by position."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.errors import ModelUnavailable
from drafters.hidden_states.block_network import BlockNetwork
from drafters.hidden_states.checkpoint import GivenRows, load_network, new_network, save_network
from drafters.hidden_states.formats import parse_deepspec, read_config

HIDDEN, VOCAB, BLOCK, RANK = 32, 61, 4, 8
RELEASED: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": BLOCK,
    "confidence_head_with_markov": True,
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "eos_token_id": 3,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "layer_types": ["full_attention", "full_attention"],
    "markov_head_type": "vanilla",
    "markov_rank": RANK,
    "mask_token_id": 60,
    "max_position_embeddings": 128,
    "num_anchors": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": None,
    "target_layer_ids": [-1, 2, 4],
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}


def released_tensors(raw: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights under the released names and shapes."""
    generator = torch.Generator().manual_seed(1)
    q, kv, inner = raw["num_attention_heads"] * raw["head_dim"], raw["num_key_value_heads"] * raw["head_dim"], 48
    shapes = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
        "hidden_norm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, len(raw["target_layer_ids"]) * HIDDEN),
        "markov_head.markov_w1.weight": (VOCAB, RANK),
        "markov_head.markov_w2.weight": (VOCAB, RANK),
        "confidence_head.proj.weight": (1, HIDDEN + RANK * raw["confidence_head_with_markov"]),
        "confidence_head.proj.bias": (1,),
    }
    if raw["markov_head_type"] == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, HIDDEN + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if raw["markov_head_type"] == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * RANK, 2 * RANK + HIDDEN)
        shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
    for i in range(raw["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.self_attn.q_proj.weight": (q, HIDDEN),
            f"layers.{i}.self_attn.k_proj.weight": (kv, HIDDEN),
            f"layers.{i}.self_attn.v_proj.weight": (kv, HIDDEN),
            f"layers.{i}.self_attn.o_proj.weight": (HIDDEN, q),
            f"layers.{i}.self_attn.q_norm.weight": (raw["head_dim"],),
            f"layers.{i}.self_attn.k_norm.weight": (raw["head_dim"],),
            f"layers.{i}.mlp.gate_proj.weight": (inner, HIDDEN),
            f"layers.{i}.mlp.up_proj.weight": (inner, HIDDEN),
            f"layers.{i}.mlp.down_proj.weight": (HIDDEN, inner),
            f"layers.{i}.input_layernorm.weight": (HIDDEN,),
            f"layers.{i}.post_attention_layernorm.weight": (HIDDEN,),
        }

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, generator=generator)
        return 1 + 0.3 * x if "norm" in name else x / shape[-1] ** 0.5

    return {name: draw(name, shape) for name, shape in shapes.items()}


def write_released(folder: Path, **changes: Any) -> dict[str, Tensor]:
    raw = RELEASED | changes
    tensors = released_tensors(raw)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


class ByTheBook:
    """One block of a drafter, one position, layer and head at a time, from the equations alone."""

    def __init__(self, w: dict[str, Tensor], raw: dict[str, Any]) -> None:
        self.w, self.raw = {name: tensor.double() for name, tensor in w.items()}, raw

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.raw["rms_norm_eps"]) * self.w[name + ".weight"]

    def turn(self, x: Tensor, position: int) -> Tensor:
        out = x.clone()
        half = len(x) // 2
        for i in range(half):
            angle = position * self.raw["rope_parameters"]["rope_theta"] ** (-2 * i / len(x))
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    def heads(self, x: Tensor, layer: str, name: str, position: int | None) -> list[Tensor]:
        """Of one row: projected, normed if it is a query or a key, and turned."""
        parts = list((self.w[f"{layer}.self_attn.{name}_proj.weight"] @ x).split(self.raw["head_dim"]))
        if position is not None:
            parts = [self.turn(self.norm(part, f"{layer}.self_attn.{name}_norm"), position) for part in parts]
        return parts

    def hidden(self, features: Tensor, anchor_token: int, anchor: int) -> list[Tensor]:
        """h_1 .. h_gamma of a block at position ``anchor``; features [anchor, F] are those of the positions before."""
        context = [self.norm(self.w["fc.weight"] @ f.double(), "hidden_norm") for f in features]
        tokens = [anchor_token] + [self.raw["mask_token_id"]] * (self.raw["block_size"] - 1)
        block = [self.w["embed_tokens.weight"][token] for token in tokens]
        group = self.raw["num_attention_heads"] // self.raw["num_key_value_heads"]
        for i in range(self.raw["num_hidden_layers"]):
            layer = f"layers.{i}"
            normed = [self.norm(x, f"{layer}.input_layernorm") for x in block]
            rows = [*enumerate(context), *((anchor + k, x) for k, x in enumerate(normed))]
            keys = [self.heads(x, layer, "k", position) for position, x in rows]  # equation 3
            values = [self.heads(x, layer, "v", None) for _, x in rows]
            for k, x in enumerate(normed):
                attended = []
                for head, query in enumerate(self.heads(x, layer, "q", anchor + k)):
                    scores = torch.stack([query @ key[head // group] for key in keys]) / self.raw["head_dim"] ** 0.5
                    weights = scores.softmax(0)
                    attended.append(weights @ torch.stack([value[head // group] for value in values]))
                block[k] = block[k] + self.w[f"{layer}.self_attn.o_proj.weight"] @ torch.cat(attended)
            for k, x in enumerate(block):
                y = self.norm(x, f"{layer}.post_attention_layernorm")
                gate, up = (self.w[f"{layer}.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
                block[k] = x + self.w[f"{layer}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        return [self.norm(x, "norm") for x in block]

    def logits(self, hidden: list[Tensor], previous: list[int]) -> list[Tensor]:
        """Equations 4 to 6, given the token before each position."""
        state = torch.zeros(RANK, dtype=torch.float64)
        out = []
        for h, token in zip(hidden, previous, strict=True):
            latent = embedding = self.w["markov_head.markov_w1.weight"][token]
            if self.raw["markov_head_type"] == "gated":
                z = torch.cat([h, embedding])
                gate = self.w["markov_head.gate_proj.weight"] @ z + self.w["markov_head.gate_proj.bias"]
                latent = torch.sigmoid(gate) * embedding
            if self.raw["markov_head_type"] == "rnn":
                z = torch.cat([state, embedding, h])
                joint = self.w["markov_head.joint_proj.weight"] @ z + self.w["markov_head.joint_proj.bias"]
                g, c, o = joint.split(RANK)
                state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
                latent = torch.tanh(o)
            out.append(self.w["lm_head.weight"] @ h + self.w["markov_head.markov_w2.weight"] @ latent)
        return out

    def confidences(self, hidden: list[Tensor], previous: list[int]) -> list[float]:
        """Equation 7."""
        out = []
        for h, token in zip(hidden, previous, strict=True):
            x = (
                torch.cat([h, self.w["markov_head.markov_w1.weight"][token]])
                if self.raw["confidence_head_with_markov"]
                else h
            )
            out.append(
                torch.sigmoid(self.w["confidence_head.proj.weight"][0] @ x + self.w["confidence_head.proj.bias"][0]).item()
            )
        return out


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("with_markov", [True, False])
def test_a_released_checkpoint_follows_the_equations(tmp_path: Path, kind: str, with_markov: bool) -> None:
    """Two packed sequences, several anchors; one has no context, one is the last token, two see each other's tokens."""
    changes = {"markov_head_type": kind, "confidence_head_with_markov": with_markov}
    book = ByTheBook(write_released(tmp_path, **changes), RELEASED | changes)
    network = load_network(tmp_path)
    generator = torch.Generator().manual_seed(2)
    lens, anchors = (9, 7), (0, 4, 5, 9 + 3, 9 + 6)
    features = torch.randn(sum(lens), 3 * HIDDEN, generator=generator)
    token_ids = torch.randint(0, VOCAB, (sum(lens) + BLOCK,), generator=generator)
    previous = torch.stack([token_ids[a : a + BLOCK] for a in anchors])
    with torch.no_grad():
        hidden = network(features, token_ids[: sum(lens)], lens, torch.tensor(anchors))
        logits = network.logits(hidden, network.latents(hidden, previous))
        confidences = network.confidence_logits(hidden, previous).sigmoid()
    for i, anchor in enumerate(anchors):
        start = 0 if anchor < lens[0] else lens[0]
        expected = book.hidden(features[start:anchor], int(token_ids[anchor]), anchor - start)
        torch.testing.assert_close(hidden[i].double(), torch.stack(expected), rtol=1e-4, atol=1e-4)
        of_tokens = torch.stack(book.logits(expected, previous[i].tolist()))
        torch.testing.assert_close(logits[i].double(), of_tokens, rtol=1e-4, atol=1e-4)
        assert confidences[i].tolist() == pytest.approx(book.confidences(expected, previous[i].tolist()), abs=1e-5)


def test_parameters_have_the_released_names(tmp_path: Path) -> None:
    for kind in ("vanilla", "gated", "rnn"):
        tensors = write_released(tmp_path, markov_head_type=kind)
        state = load_network(tmp_path).state_dict()
        assert {name: tensor.shape for name, tensor in state.items()} == {n: t.shape for n, t in tensors.items()}
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def ours(**changes: Any) -> dict[str, Any]:
    extension = {"shares_embedding": True, "draft_token_ids": [0, 3, 7, 8, 20, 60], "fc_bias": True, "anchor_input": True}
    return RELEASED | extension | changes


@pytest.mark.parametrize("rank", [None, 5])
def test_our_format_is_saved_and_loaded_without_the_targets_rows(tmp_path: Path, rank: int | None) -> None:
    target = GivenRows(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN))
    raw = ours() if rank is None else ours(anchor_input_rank=rank)
    network = new_network(parse_deepspec(raw), target)
    save_network(network, tmp_path, raw, "fp32")
    again = load_network(tmp_path, target)
    assert again.config == network.config
    features, token_ids, anchors = torch.randn(6, 3 * HIDDEN), torch.tensor([1, 3, 9, 60, 7, 5]), torch.tensor([2, 5])
    previous = torch.tensor([[9, 60, 7, 3], [5, 0, 0, 0]])
    with torch.no_grad():
        hidden = network(features, token_ids, (6,), anchors)
        logits = network.logits(hidden, network.latents(hidden, previous))
        restored = again(features, token_ids, (6,), anchors)
    assert torch.equal(restored, hidden)
    assert logits.shape == (2, BLOCK, 6)
    # Tokens 9 and 5 are outside the reduced vocabulary, so they have the same row of W_1; 60 and 7 have their own.
    rows = network.previous_embeddings(torch.tensor([9, 5, 60, 7]))
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[2], rows[3])
    assert torch.equal(again.lm_head.weight, target.head[[0, 3, 7, 8, 20, 60]])
    stored = (tmp_path / "model.safetensors").stat().st_size
    assert (
        stored
        < sum(
            4 * p.numel() for name, p in network.named_parameters() if name not in ("embed_tokens.weight", "lm_head.weight")
        )
        + 8192
    )
    with pytest.raises(ModelUnavailable, match="beside its target"):
        load_network(tmp_path)
    with pytest.raises(ModelUnavailable, match="this one has"):
        load_network(tmp_path, GivenRows(torch.zeros(VOCAB, 16), torch.zeros(VOCAB, 16)))


def block_inputs(network: BlockNetwork, *arguments: Any) -> torch.Tensor:
    """What the first layer gets, [anchors, block, hidden]."""
    seen: list[torch.Tensor] = []
    hook = network.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    network(*arguments)
    hook.remove()
    return seen[0]


def test_the_anchors_context_is_added_to_the_inputs() -> None:
    """First with a map of zero. A block without context reads zeros as features."""
    target = GivenRows(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN))
    network = new_network(parse_deepspec(ours()), target)
    plain = new_network(parse_deepspec(ours(anchor_input=False)), target)
    plain.load_state_dict({k: v for k, v in network.state_dict().items() if not k.startswith("anchor_input")})
    assert network.anchor_input is not None
    features, token_ids, anchors = torch.randn(5, 3 * HIDDEN), torch.tensor([1, 3, 9, 4, 7]), torch.tensor([0, 3])
    with torch.no_grad():
        for parameter in network.anchor_input.parameters():
            parameter.zero_()
        assert torch.equal(network(features, token_ids, (5,), anchors), plain(features, token_ids, (5,), anchors))
        inputs = torch.randn(BLOCK, HIDDEN)
        network.anchor_input.maps.bias.copy_(inputs.flatten())
        network.anchor_input.maps.weight[:, : features.shape[1]] = 0.1
    got, base = (block_inputs(one, features, token_ids, (5,), anchors) for one in (network, plain))
    torch.testing.assert_close(got[0] - base[0], inputs)
    torch.testing.assert_close(got[1] - base[1], inputs + 0.1 * features[2].sum())


def test_blocks_do_not_see_each_other_or_the_future(tmp_path: Path) -> None:
    write_released(tmp_path)
    network = load_network(tmp_path)
    features, token_ids = torch.randn(12, 3 * HIDDEN), torch.arange(12)
    with torch.no_grad():
        together = network(features, token_ids, (12,), torch.tensor([2, 3, 7]))
        alone = network(features, token_ids, (12,), torch.tensor([3]))
        features[3:] = 1e3
        token_ids[4:] = 0
        blind = network(features, token_ids, (12,), torch.tensor([3]))
    torch.testing.assert_close(together[1], alone[0])
    assert torch.equal(blind, alone)


def test_everything_but_the_targets_rows_is_trained(tmp_path: Path) -> None:
    write_released(tmp_path, markov_head_type="rnn")
    network = load_network(tmp_path)
    hidden = network(torch.randn(6, 3 * HIDDEN), torch.arange(6), (6,), torch.tensor([2, 4]))
    previous = torch.tensor([[2, 3, 4, 5], [4, 5, 6, 7]])
    loss = network.logits(hidden, network.latents(hidden, previous)).square().sum()
    (loss + network.confidence_logits(hidden, previous).sum()).backward()
    frozen = {name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}


def refused(changes: dict[str, Any]) -> str:
    with pytest.raises(ModelUnavailable) as error:
        parse_deepspec({key: value for key, value in (RELEASED | changes).items() if value != "missing"})
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gemma4"}, "model_type 'gemma4' is not supported"),
        ({"markov_head_type": "fir"}, "markov_head_type 'fir' is not supported; supported are vanilla, gated, rnn"),
        ({"markov_rank": 0}, "needs a Markov head"),
        ({"block_size": 0}, "block_size must be a whole number between 1 and 64, got 0"),
        ({"block_size": 7.0}, "got 7.0"),
        ({"mask_token_id": VOCAB}, "mask_token_id must be a whole number between 0 and 60, got 61"),
        ({"target_layer_ids": [2, 1]}, "must ascend between -1 and 5"),
        ({"target_layer_ids": [2, 6]}, "must ascend between -1 and 5"),
        ({"target_layer_ids": []}, "must ascend"),
        ({"target_layer_ids": "12"}, "must be a list of whole numbers"),
        ({"draft_token_ids": [5, 3]}, "draft_token_ids must ascend"),
        ({"draft_token_ids": [1, VOCAB]}, "between 0 and 60"),
        ({"anchor_input_rank": 3}, "anchor_input is not"),
    ],
)
def test_unsupported_configurations_are_refused(changes: dict[str, Any], reason: str) -> None:
    assert reason in refused(changes)


def test_broken_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"config\.json is missing"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelUnavailable, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelUnavailable, match="not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in RELEASED.items() if k != "block_size"}))
    with pytest.raises(ModelUnavailable, match="has no field 'block_size'"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RELEASED | {"draft_token_ids": "tokens.json"}))
    with pytest.raises(ModelUnavailable, match=r"tokens\.json is missing"):
        read_config(tmp_path)
    tensors = write_released(tmp_path)
    save_file({k: v for k, v in tensors.items() if k != "fc.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnavailable, match=r"no tensor fc\.weight"):
        load_network(tmp_path)


def test_without_a_sequential_head_the_logits_are_the_heads(tmp_path: Path) -> None:
    raw = RELEASED | {"markov_rank": 0, "enable_confidence_head": False}
    config = parse_deepspec(raw)
    network = new_network(config, GivenRows(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)))
    hidden = torch.randn(1, BLOCK, HIDDEN)
    assert network.latents(hidden, torch.zeros(1, BLOCK, dtype=torch.int64)) is None
    assert torch.equal(network.logits(hidden, None), network.lm_head(hidden))
    assert replace(config, markov_rank=RANK).num_markov_rows == VOCAB
