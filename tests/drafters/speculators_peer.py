"""``speculators_peer.py TARGET OUT``: random drafters of each kind for the model in TARGET, written by the speculators
package, and what its own forward computes. Run in the environment of ``make test-drafters``.

Each folder of OUT gets ``expected.safetensors``: token ids and features of a sequence, anchors, and the logits of the drafts
at each, over the drafter's vocabulary."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models import (
    DFlashDraftModel,
    DFlashSpeculatorConfig,
    DSparkDraftModel,
    DSparkSpeculatorConfig,
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
    PEagleDraftModel,
    PEagleSpeculatorConfig,
)
from speculators.models.dflash import core as dflash_core
from speculators.models.peagle import core as peagle_core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

LENGTH, DRAFT_LEN, MASK, WINDOW = 90, 6, 5, 32
ANCHORS = (33, 64, 80)  # of blocks


def layer_config(target: dict[str, Any], kind: str, num_layers: int, **changes: Any) -> Any:
    make = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind]
    config = make(
        vocab_size=target["vocab_size"],
        hidden_size=target["hidden_size"],
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        **changes,
    )
    config._attn_implementation = "eager"
    return config


def described(algorithm: str, draft_len: int) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=draft_len)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def randomised(model: torch.nn.Module, rows: dict[str, torch.Tensor], seed: int) -> Any:
    """Random weights, with the target's rows where the drafter has none of its own."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size, draft_size = len(rows["embedding"]), model.draft_vocab_size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            width = parameter.shape[-1] if parameter.dim() > 1 else 4
            noise = torch.randn(parameter.shape, generator=generator) / width**0.5
            parameter.copy_(1 + 0.3 * noise if "norm" in name and parameter.dim() == 1 else 1.5 * noise)
        model.embed_tokens.weight.copy_(rows["embedding"])
        if draft_size < vocab_size:
            ids = torch.randperm(vocab_size, generator=generator)[:draft_size].sort().values
            model.t2d.zero_()
            model.t2d[ids] = True
            model.d2t.copy_(ids - torch.arange(draft_size))
        else:
            model.lm_head.weight.copy_(rows["head"])
    return model.eval()


def main(target_folder: Path, out: Path) -> None:
    target = json.loads((target_folder / "config.json").read_text())
    from safetensors.torch import load_file

    weights = load_file(target_folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].float()
    rows = {"embedding": embedding, "head": weights.get("lm_head.weight", embedding).float()}
    vocab_size, hidden = target["vocab_size"], target["hidden_size"]
    last = target["num_hidden_layers"] - 1
    generator = torch.Generator().manual_seed(1)
    zeros = torch.zeros(1, LENGTH, dtype=torch.long)
    token_ids = torch.randint(vocab_size - 1, (LENGTH,), generator=generator)
    sliding = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}

    def write(name: str, model: Any, num_aux: int, compute: Any) -> None:
        features = torch.randn(LENGTH, num_aux * hidden, generator=generator)
        anchors, logits = compute(model, features)
        model.save_pretrained(out / name)
        expected = {"token_ids": token_ids, "features": features, "anchors": torch.tensor(anchors), "logits": logits}
        save_file({key: value.contiguous() for key, value in expected.items()}, out / name / "expected.safetensors")

    def eagle(model: Any, features: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """Its rows pair features with the next token, which its data loader shifts."""
        found: list[torch.Tensor] = []
        hook = model.lm_head.register_forward_hook(lambda _, __, result: found.append(result[0].detach()))
        with torch.no_grad():
            model(features[None, :-1], token_ids[None, 1:], zeros[:, 1:], ttt_steps=DRAFT_LEN)
        hook.remove()
        anchors = list(range(1, LENGTH - DRAFT_LEN))
        return anchors, torch.stack(found, dim=1)[[anchor - 1 for anchor in anchors]]

    def peagle(model: Any, features: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        anchors = list(range(1, LENGTH - DRAFT_LEN))
        depths = torch.arange(DRAFT_LEN).repeat_interleave(LENGTH - 1)
        at = torch.arange(LENGTH - 1).repeat(DRAFT_LEN)
        kept = at + depths < LENGTH - 1
        peagle_core.generate_cod_sample_indices = lambda **_: (at[kept], depths[kept])
        peagle_core.compute_metrics = lambda **_: (torch.zeros(()), {})  # its losses need Triton
        found: list[torch.Tensor] = []
        hook = model.lm_head.register_forward_hook(lambda _, __, result: found.append(result[0].detach()))
        with torch.no_grad():
            model(
                features[None, :-1],
                token_ids[None, 1:],
                zeros[:, 1:],
                verifier_last_hidden_states=features[None, :-1, :hidden],
            )
        hook.remove()
        where = {(a, d): i for i, (a, d) in enumerate(zip(at[kept].tolist(), depths[kept].tolist(), strict=True))}
        order = torch.tensor([[where[anchor - 1, d] for d in range(DRAFT_LEN)] for anchor in anchors])
        return anchors, found[0][order]

    def block(model: Any, features: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        chosen = torch.tensor(ANCHORS)
        dflash_core.select_anchors = lambda *_: (chosen, torch.ones(len(ANCHORS), dtype=torch.bool))
        ones = torch.ones(1, LENGTH)
        arguments = (features[None], token_ids[None], ones, features[None, :, :hidden], zeros)
        with torch.no_grad():
            states, logits, _, _, indices = model._backbone_forward(*arguments, max_anchors=len(ANCHORS))
        size, skipped = model.block_size, 0 if model.config.sample_from_anchor else 1
        logits = logits[0].view(len(ANCHORS), size, -1)
        head = getattr(model, "markov_head", None)
        if head is not None:
            tokens = token_ids[indices.clamp_max(LENGTH - 1)].view(len(ANCHORS), size)
            previous = tokens if not skipped else torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)
            logits = (
                logits
                + head.block_bias(prev_token_ids=previous, hidden_states=states[0].view(len(ANCHORS), size, -1)).detach()
            )
        return list(ANCHORS), logits[:, skipped:]

    aux = [0, 1, last]
    for name, kind, draft_size, changes in (
        ("eagle3", "llama", 100, {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": aux}),
        ("eagle3-plain", "llama", vocab_size, {"eagle_aux_hidden_state_layer_ids": aux}),
        ("eagle3-normed", "llama", 100, {"fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": aux}),
        ("eagle3-qwen", "qwen3", 100, {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": aux}),
        ("eagle3-default-layers", "llama", 100, {}),
    ):
        layers = layer_config(target, kind, 1 if kind == "llama" else 2)
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=draft_size,
            speculators_config=described("eagle3", DRAFT_LEN),
            **changes,
        )
        write(name, randomised(Eagle3DraftModel(config), rows, len(name)), 3, eagle)
    windowed = layer_config(target, "qwen3", 1, **{**sliding, "layer_types": ["sliding_attention"]})
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=windowed,
        draft_vocab_size=100,
        eagle_aux_hidden_state_layer_ids=aux,
        speculators_config=described("eagle3", DRAFT_LEN),
    )
    write("eagle3-sliding", randomised(Eagle3DraftModel(config), rows, 3), 3, eagle)
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer_config(target, "llama", 2),
        draft_vocab_size=100,
        mask_token_id=MASK,
        eagle_aux_hidden_state_layer_ids=aux,
        speculators_config=described("peagle", DRAFT_LEN),
    )
    write("peagle", randomised(PEagleDraftModel(config), rows, 4), 3, peagle)
    for name, make_config, make, changes in (
        ("dflash", DFlashSpeculatorConfig, DFlashDraftModel, {}),
        ("dflash-sliding", DFlashSpeculatorConfig, DFlashDraftModel, {}),
        ("dspark", DSparkSpeculatorConfig, DSparkDraftModel, {"markov_rank": 8}),
        ("dspark-gated", DSparkSpeculatorConfig, DSparkDraftModel, {"markov_rank": 8, "markov_head_type": "gated"}),
        ("dspark-rnn", DSparkSpeculatorConfig, DSparkDraftModel, {"markov_rank": 8, "markov_head_type": "rnn"}),
        ("dspark-bonus", DSparkSpeculatorConfig, DSparkDraftModel, {"markov_rank": 8, "sample_from_anchor": False}),
    ):
        config = make_config(
            transformer_layer_config=layer_config(target, "qwen3", 2, **(sliding if "sliding" in name else {})),
            draft_vocab_size=vocab_size if name == "dflash" else 100,
            block_size=DRAFT_LEN + (not (make is DSparkDraftModel and changes.get("sample_from_anchor", True))),
            aux_hidden_state_layer_ids=[0, last],
            mask_token_id=MASK,
            speculators_config=described(name.split("-")[0], DRAFT_LEN),
            **changes,
        )
        write(name, randomised(make(config), rows, len(name)), 2, block)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
