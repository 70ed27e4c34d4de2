"""GGUF files: configuration, tokenizer and chat template of their metadata, names on a hub, and files that are refused."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from gguf.quants import dequantize
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from tokenizers.processors import TemplateProcessing

from cluster.config import Config, ModelConfig
from cluster.errors import ModelUnavailable
from cluster.model_name import HubName
from cluster.private_folder import cache_folder
from deploy.command_line import parse
from engine.cpu.build import load_library
from engine.factory import load_model
from engine.models import gguf
from engine.models.config import load_config
from engine.models.gguf_file import GgufFile
from engine.models.hub import HEADER_BYTES, HEADERS, KEPT_HEADERS, chosen_file
from engine.models.prepare import ensure_model, resolve_model
from tests.support.compiler import needs_compiler
from tests.support.gguf_files import K_FACTORS, add_tensors, k_matrix, write_gguf, write_merging_model
from tests.support.hub import running_hub
from tests.support.servers import served_without_ray
from tests.support.settings import ALWAYS_DRAFTED, small_config
from tests.support.tiny_model import CHAT_TEMPLATE, END
from tests.support.waiting import DEADLINE_S


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_merging_model(tmp_path_factory.mktemp("gguf"))
    (folder / "generation_config.json").unlink()
    return folder


@pytest.fixture
def file(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    return write_gguf(tmp_path / "Tiny-F32.gguf", tiny_folder)


def config_of(path: Path) -> dict[str, Any]:
    return gguf.config_of(GgufFile(path))


@pytest.mark.slow
def test_a_file_is_served_as_its_folder_is(file: Path, tiny_folder: Path) -> None:
    """Weights in Hugging Face's order, the tokenizer's ids, the chat template and the settings; prepared once, and weights
    are written for vLLM alone."""
    with pytest.raises(ModelUnavailable, match="is not prepared; run `outrider models prepare"):
        resolve_model(str(file))
    folder = ensure_model(str(file))
    assert resolve_model(str(file)) == folder
    assert not list(folder.glob("*.safetensors"))
    model = load_model(folder, "float32", num_layers=1)
    assert model.embedding.equal(load_model(tiny_folder, "float32").embedding)
    with pytest.raises(ModelUnavailable, match="has no weights that vLLM reads"):
        resolve_model(str(file), "vllm")
    assert ensure_model(str(file), engine="vllm") == folder == resolve_model(str(file))
    stamp = (folder / "outrider.json").stat().st_mtime_ns
    assert ensure_model(str(file)) == folder
    assert (folder / "outrider.json").stat().st_mtime_ns == stamp
    assert load_config(folder) == load_config(tiny_folder)
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    ours, theirs = (Tokenizer.from_file(str(one / "tokenizer.json")) for one in (folder, tiny_folder))
    text = f"Ünïcode to 12 {END}\n"
    assert ours.encode(text).ids == theirs.encode(text).ids
    from safetensors.torch import load_file as load

    found, expected = load(folder / "model.safetensors"), load(tiny_folder / "model.safetensors")
    for name, tensor in expected.items():
        assert found[name].equal(tensor.to(found[name].dtype)), name
    os.utime(file, ns=(1, 1))
    with pytest.raises(ModelUnavailable, match="changed since it was prepared"):
        resolve_model(str(file))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_each_family_has_its_own_shape(tiny_folder: Path, tmp_path: Path, family: str) -> None:
    """The width of a head is stated by Qwen 3's files, where it is not hidden size over heads."""
    path = write_gguf(tmp_path / "a.gguf", tiny_folder, family, "qwen2", attention__key_length=16)
    config = config_of(path)
    assert (config["model_type"], config["head_dim"], config["vocab_size"]) == (family, 16, 258)
    assert config["eos_token_id"] == 257
    tokenizer = gguf.tokenizer_of(path, 512)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")  # NFC, as Qwen's own
    assert tokenizer.encode(f"é{END}")[-1] == 257


def test_frequencies_of_llama_3_come_from_its_tensor(tiny_folder: Path, tmp_path: Path) -> None:
    head_dim, theta = 8, 500000.0
    scaling = gguf.Llama3Scaling(8.0, 1.0, 4.0, 8192)
    plain, long = (gguf.frequencies_of(head_dim, gguf.RopeConfig(theta, llama3=one)) for one in (None, scaling))
    factors = np.array([a / b for a, b in zip(plain, long, strict=True)], np.float32)
    rope = config_of(write_gguf(tmp_path / "a.gguf", tiny_folder, rope__freq_base=theta, rope_freqs=factors))[
        "rope_parameters"
    ]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("llama3", 8.0, 8192)
    with pytest.raises(ModelUnavailable, match=r"rope_freqs\.weight scales"):
        config_of(write_gguf(tmp_path / "b.gguf", tiny_folder, rope_freqs=factors[::-1].copy()))


def test_a_tokenizer_keeps_digits_apart_as_smollm_does(tiny_folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", tiny_folder, split="smollm")
    split = gguf.tokenizer_of(path, 512).backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 12")
    assert [piece for piece, _ in split] == ["a", "Ġ", "1", "2"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-4000], r"is cut off: it has [\d,]+ bytes of [\d,]+; download or copy it again"),
        (lambda data: data[:3000], "is cut off or damaged in its header"),
        (lambda data: data[:6], "cut off or damaged"),
        (lambda data: b"GGUF" + struct.pack(">I", 3) + data[8:], "is big-endian; convert it with"),
        (lambda data: b"PK\3\4" + data[4:], "is no GGUF file: it begins with"),
        (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "GGUF v9"),
        (lambda data: b"", "is no GGUF file"),
    ],
)
def test_a_broken_file_is_refused_with_its_reason(file: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelUnavailable, match=message) as refused:
        GgufFile(file)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("gemma3", {}, "general.architecture 'gemma3' is not supported; supported are llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "expert_count 8 is not supported"),
        ("llama", {"llama__rope__scaling__type": "yarn"}, "scaling.type 'yarn' is not supported"),
        ("llama", {"rope__dimension_count": 4}, "dimension_count 4 is not supported"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    tiny_folder: Path, tmp_path: Path, family: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelUnavailable, match=message):
        config_of(write_gguf(tmp_path / "a.gguf", tiny_folder, family, **values))


@pytest.mark.parametrize(("split", "begins"), [("llama-bpe", True), ("qwen2", False)])
def test_prompts_of_llama_3_begin_with_bos_as_in_llama_cpp(
    tiny_folder: Path, tmp_path: Path, split: str, begins: bool
) -> None:
    tokenizer = gguf.tokenizer_of(write_gguf(tmp_path / "a.gguf", tiny_folder, "llama", split), 512)
    assert (tokenizer("a").input_ids[0] == 257) == begins
    assert tokenizer.backend_tokenizer.model.ignore_merges == begins


WORDS = "the quick brown fox jumps over the lazy dog, and the dog sleeps over there. 12 is not 21; naïve\n"
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def sentencepiece_of_llama_2() -> tuple[Tokenizer, list[str], list[float], list[TokenType]]:
    """A tokenizer as Hugging Face has those of Llama 2 and Mistral, and the pieces, scores and types of its file: pieces of
    several characters by the order of their merges, then single ones."""
    trained = Tokenizer(models.BPE())
    trained.train_from_iterator([WORDS.replace(" ", "\u2581")] * 9, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]
    joined = list(dict.fromkeys("".join(merge) for merge in merges))
    pieces = ["<unk>", "<s>", "</s>", *BYTES, *joined, *(one for one in learned["vocab"] if one not in joined)]
    num_first = 3 + len(BYTES)
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>"
    )
    whole = Tokenizer(model)
    whole.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    whole.decoder = decoders.Sequence(steps)
    whole.add_special_tokens(["<unk>", "<s>", "</s>"])
    whole.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    scores = [0.0] * num_first + [-float(i) for i in range(len(pieces) - num_first)]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    return whole, pieces, scores, types + [TokenType.NORMAL] * (len(pieces) - num_first)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_is_that_of_hugging_face(tmp_path: Path, prefix: bool) -> None:
    theirs, pieces, scores, types = sentencepiece_of_llama_2()
    if not prefix:
        theirs.normalizer = normalizers.Replace(" ", "\u2581")
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    add_tensors(writer, {}, {}, quantised=False)
    ours = gguf.tokenizer_of(tmp_path / "a.gguf", 512).backend_tokenizer
    for text in (WORDS, "  the dog", " ", "", "the</s>the dog<s> quick", "e\u0301 \U0001f600\t<0x41>", "over  there\n\n"):
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text).ids, text
        if prefix or not text.startswith(" "):
            assert ours.decode(ids) == theirs.decode(ids)
    assert max(ours.encode(WORDS).ids) > 3 + 256 + 30, "pieces of the vocabulary, not bytes"


def test_a_tokenizer_of_an_unknown_kind_is_refused(file: Path, tiny_folder: Path) -> None:
    write_gguf(file, tiny_folder, split="of-another-family")
    with pytest.raises(ModelUnavailable, match=r"tokenizer\.ggml\.pre 'of-another-family' is not supported"):
        gguf.tokenizer_of(file, 512)
    write_gguf(file, tiny_folder)
    file.write_bytes(file.read_bytes().replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.mangled"[:21]))
    with pytest.raises(ModelUnavailable, match=r"has no tokenizer\.ggml\.merges"):
        gguf.tokenizer_of(file, 512)


FILES = ("x-Q4_K_M.gguf", "x-Q4_K_S.gguf", "UD-Q4_K_XL/x.gguf", "Q8_0/x-00001-of-00002.gguf", "mmproj-F16.gguf", "README.md")


@pytest.mark.parametrize(
    ("asked", "found"),
    [("Q4_K_M", "x-Q4_K_M.gguf"), ("q4_k_s", "x-Q4_K_S.gguf"), ("ud-q4_k_xl", "UD-Q4_K_XL/x.gguf"), (FILES[0], FILES[0])],
)
def test_a_quantization_names_one_file(asked: str, found: str) -> None:
    assert chosen_file(HubName("a/b", None, asked), FILES) == found


@pytest.mark.parametrize("asked", ["0", "M", "K_M", "4_K_M", "NL"])
def test_a_part_of_a_quantization_names_no_file(asked: str) -> None:
    with pytest.raises(ModelUnavailable, match="no such GGUF file"):
        chosen_file(HubName("a/b", None, asked), ["x-Q8_0.gguf", "x_Q4_K_M.gguf", "IQ4_NL.gguf"])


def test_several_files_parts_and_none_are_told_apart() -> None:
    with pytest.raises(ModelUnavailable, match=r"no such GGUF file; it has Q8_0/x-.*, UD-Q4_K_XL/x\.gguf, x-Q4_K_M\.gguf"):
        chosen_file(HubName("a/b", None, "Q4_K"), FILES)
    with pytest.raises(ModelUnavailable, match=r"a/b:Q8_0 is stored in 2 parts.*llama-gguf-split --merge"):
        chosen_file(HubName("a/b", None, "Q8_0"), FILES)
    with pytest.raises(ModelUnavailable, match=r"names 2 files: choose one as a/b/FILE; they are x-F16\.gguf, y-F16\.gguf"):
        chosen_file(HubName("a/b", None, "F16"), ["x-F16.gguf", "y-F16.gguf"])


@pytest.mark.parametrize(
    ("name", "parsed", "public"),
    [
        ("a/b:Q4_K_M", HubName("a/b", None, "Q4_K_M"), "a/b:Q4_K_M"),
        ("a/b:Q4_K_M@v1", HubName("a/b", "v1", "Q4_K_M"), "a/b:Q4_K_M"),
        ("a/b/c-Q4_0.gguf", HubName("a/b", None, "c-Q4_0.gguf"), "c-Q4_0"),
        ("a/b/d/c.gguf@v1", HubName("a/b", "v1", "d/c.gguf"), "c"),
        ("/models/c-Q4_0.gguf", None, "c-Q4_0"),
        ("c-Q4_0.gguf", None, "c-Q4_0"),
    ],
)
def test_names_of_gguf_files(name: str, parsed: HubName | None, public: str) -> None:
    assert HubName.parse(name) == parsed
    assert parsed is None or str(parsed) == name
    assert Config(model=ModelConfig(name=name)).model.public_names == (public,)


def test_a_file_on_the_command_line_is_the_model(file: Path) -> None:
    assert parse([str(file)]).fields == {"model": {"name": str(file)}}


@pytest.mark.slow
def test_a_file_of_the_hub_is_downloaded_alone(file: Path, tmp_path: Path) -> None:
    published = tmp_path / "published"
    published.mkdir()
    file.rename(published / "Tiny-Q8_0.gguf")
    (published / "Tiny-Q2_K.gguf").write_bytes(b"never asked for")
    code = """
import sys
from cluster.config import Config, ModelConfig
from cluster.errors import OutriderError
from deploy.model_files import with_files
from engine.models.prepare import resolve_model
for name in sys.argv[1:]:
    try:
        name = with_files(Config(model=ModelConfig(name=name))).model.name
        print(name, resolve_model(name).name)
    except OutriderError as error:
        print(error)
"""
    with running_hub({"test/Tiny-GGUF": published}) as hub:
        names = [
            "test/Tiny-GGUF:Q8_0",
            "test/Tiny-GGUF/Tiny-Q8_0.gguf",
            "test/Tiny-GGUF:Q3_K",
            "test/Tiny-GGUF",
            "test/No:Q8_0",
        ]

        def ran(*names: str, **more: str) -> list[str]:
            env = {**os.environ, **hub.environment(tmp_path / "cache", **more)}
            out = subprocess.run([sys.executable, "-c", code, *names], env=env, capture_output=True, text=True, check=True)
            return out.stdout.splitlines()

        by_tag, by_file, other, whole, gone = ran(*names)
        pinned, folder = by_tag.split()
        assert pinned == f"test/Tiny-GGUF:Q8_0@{hub.commit('test/Tiny-GGUF')}"
        assert by_file.split()[1] == folder
        assert "no such GGUF file; it has Tiny-Q2_K.gguf, Tiny-Q8_0.gguf" in other
        assert "name one, such as test/Tiny-GGUF:Q4_K_M" in whole
        assert "has no such model" in gone
        assert not list((tmp_path / "cache").rglob("*Q2_K*"))
        hub.is_down = True
        assert ran(pinned, names[0], HF_HUB_OFFLINE="1") == [by_tag, by_tag]
        assert ran(names[0]) == [by_tag]


@pytest.mark.slow
def test_machines_without_the_target_read_the_header_of_a_file_alone(file: Path, tmp_path: Path) -> None:
    """Unless it holds more than is read: then the file is downloaded. Headers of few commits are kept."""
    tokenizer, num_bytes = ensure_model(str(file)) / "tokenizer.json", HEADER_BYTES + 2**23
    os.truncate(file, num_bytes)
    published = tmp_path / "published"
    published.mkdir()
    file.rename(published / "Tiny-Q8_0.gguf")
    code = """
import sys
from cluster.config import Config, ModelConfig
from deploy.model_files import tokenizer_folder
from engine.models import hub
hub.HEADER_BYTES = int(sys.argv[1])
print(tokenizer_folder(Config(model=ModelConfig(name=sys.argv[2])), "/of/another/machine"))
"""
    for i in range(KEPT_HEADERS + 2):
        (tmp_path / "a" / HEADERS / f"commit-{i}").mkdir(parents=True)
        os.utime(tmp_path / "a" / HEADERS / f"commit-{i}", (i, i))
    with running_hub({"test/Tiny-GGUF": published}) as hub:
        commit = hub.commit("test/Tiny-GGUF")
        name = f"test/Tiny-GGUF:Q8_0@{commit}"
        for home, most, is_down, num_read in (
            ("a", HEADER_BYTES, False, HEADER_BYTES),
            ("a", HEADER_BYTES, True, 0),
            ("b", 1000, False, 1000 + num_bytes),
        ):
            hub.is_down, hub.asked["bytes"] = is_down, 0
            env = {**os.environ, **hub.environment(tmp_path / home), "OUTRIDER_HOME": str(tmp_path / home)}
            run = subprocess.run([sys.executable, "-c", code, str(most), name], env=env, capture_output=True, text=True)
            assert (Path(run.stdout.strip()) / "tokenizer.json").read_bytes() == tokenizer.read_bytes(), run.stderr
            assert hub.asked["bytes"] == num_read
            assert ("downloaded whole" in run.stderr) == (most < HEADER_BYTES)
    kept = {folder.name for folder in (tmp_path / "a" / HEADERS).iterdir()}
    assert kept == {commit, *(f"commit-{i}" for i in range(3, KEPT_HEADERS + 2))}


PROMPTS, NUM_TOKENS = ((50, 51, 52, 50, 51), tuple(range(80, 120))), 180


def written_in_k_types(folder: Path) -> tuple[Path, Path]:
    """A file whose matrices are of K types in turn, and a folder with the same weights in fp32."""
    plain = write_merging_model(folder / "plain", hidden_size=256, intermediate_size=512)
    tensors = load_file(plain / "model.safetensors")
    matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2]
    blocks = {
        name: (kind, k_matrix(kind, *tensors[name].shape, seed=seed))
        for seed, (name, kind) in enumerate(zip(matrices, cycle(K_FACTORS), strict=False))
    }
    restored = {name: dequantize(rows, kind) for name, (kind, rows) in blocks.items()}
    save_file(tensors | restored, plain / "model.safetensors", metadata={"format": "pt"})
    return write_gguf(folder / "Tiny-Q4_K_M.gguf", plain, blocks=blocks), plain


@needs_compiler
@pytest.mark.slow
def test_a_file_of_k_types_answers_as_its_weights_in_fp32_however_it_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types that most people download. The root mean square of the differences of log-probabilities, over 720 tokens, is
    what `docs/measurements/decode.md` promises."""
    from transformers import AutoModelForCausalLM

    load_library(torch.float32, kv_dtype=torch.bfloat16)
    (tmp_path / "kernels").symlink_to(cache_folder() / "kernels")
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    file, plain = written_in_k_types(tmp_path)
    base, found, num_accepted = small_config(str(file), tmp_path), list[torch.Tensor](), 0
    target = base.target.model_copy(update={"dtype": "as-shipped", "kv_cache_gb": 0.02})
    changes = {"target": target, "drafters": base.drafters[:1], "planner": ALWAYS_DRAFTED}
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with served_without_ray(base.model_copy(update=changes)) as url, httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        for number, prompt in enumerate(2 * PROMPTS):
            asked = {"model": file.stem, "prompt": prompt, "max_tokens": NUM_TOKENS, "seed": number, "logprobs": 1}
            asked |= {"temperature": number // 2 * 0.8, "ignore_eos": True, "return_token_ids": True}
            off, on = (http.post("/v1/completions", json=asked | {"drafting": how}).json() for how in ("off", "ngram"))
            assert off["choices"] == on["choices"]
            num_accepted += on["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
            token_ids = torch.tensor([*prompt, *on["choices"][0]["token_ids"]])
            with torch.no_grad():
                logits = reference(token_ids[None]).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, token_ids[len(prompt) :, None])[:, 0]
            found.append(torch.tensor(on["choices"][0]["logprobs"]["token_logprobs"]) - expected)
    assert num_accepted > 0
    assert 0 < torch.cat(found).square().mean().sqrt() < 0.02


@pytest.mark.model
def test_the_shipped_file_has_the_tokenizer_of_its_folder(model_folder: Path) -> None:
    from engine.models.prepare import CATALOGUE

    source = CATALOGUE["smollm2-135m"].source()
    config = config_of(source)
    own, theirs = load_config(model_folder), gguf.parse_config(config, eos=2)
    assert own == replace(theirs, norm_eps=own.norm_eps)  # the folder keeps the value of fp32
    tokenizer = gguf.tokenizer_of(source, 8192)
    known = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    text = "<|im_start|>user\nIt's 3.14, naïve?\n\n    def f(x): return 'é'<|im_end|>"
    assert tokenizer.encode(text) == known.encode(text).ids
