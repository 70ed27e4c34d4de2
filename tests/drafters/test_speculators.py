"""Drafters in vLLM's speculators format, written and computed by the speculators package: read and computed by us, in plain
torch and as served. ``make test-drafters`` makes the package's environment."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cluster.sampling_params import SamplingParams
from drafters.hidden_states.block_network import BlockNetwork
from drafters.hidden_states.checkpoint import load_network
from drafters.hidden_states.drafter import HiddenStateDrafter
from drafters.hidden_states.families import Network, make_stage
from drafters.hidden_states.sequential import SequentialStage
from drafters.protocol import Demand
from engine.kv_cache import BLOCK_LEN
from engine.sampling import Sampler
from engine.target import FeatureSpan
from tests.support.colocated import write_target
from tests.support.dspark import CPU, target_rows

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".speculators" / "bin" / "python"
NAMES = (
    *("eagle3", "eagle3-plain", "eagle3-normed", "eagle3-qwen", "eagle3-default-layers", "eagle3-sliding", "peagle"),
    *("dflash", "dflash-sliding", "dspark", "dspark-gated", "dspark-rnn", "dspark-bonus"),
)
GREEDY = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
NUM_LAYERS = 3

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="there is no .speculators: run make test-drafters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, and beside it the drafters."""
    folder = tmp_path_factory.mktemp("speculators")
    write_target(folder / "target")
    script = Path(__file__).with_name("speculators_peer.py")
    command = [str(PYTHON), str(script), str(folder / "target"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


class Given:
    """The features of one request."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def read_hidden_states(self, spans: Sequence[FeatureSpan]) -> tuple[list[bool], Tensor]:
        return [True] * len(spans), torch.cat([self._rows[span.start : span.stop] for span in spans])


def reference(network: Network, expected: dict[str, Tensor]) -> Tensor:
    """[anchors, tokens, outputs], with the actual tokens."""
    token_ids, anchors, draft_len = expected["token_ids"], expected["anchors"], expected["logits"].shape[1]
    given = (expected["features"], token_ids, (len(token_ids),), anchors)
    if not isinstance(network, BlockNetwork):
        return network.logits(network(*given, draft_len))
    hidden = network(*given)
    previous = token_ids[(anchors[:, None] + torch.arange(draft_len)).clamp_max(len(token_ids) - 1)]
    return network.logits(hidden, network.latents(hidden, previous))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_drafter_computes_what_speculators_does(folder: Path, name: str) -> None:
    rows, expected = target_rows(folder / "target"), load_file(folder / name / "expected.safetensors")
    network = load_network(folder / name, rows, num_target_layers=NUM_LAYERS)
    logits = reference(network, expected)
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-4, atol=1e-4)

    sampler = Sampler(network.config.shape.vocab_size, ())
    sequential = SequentialStage(network, torch.float32, CPU, sampler)
    stage = make_stage(network, torch.float32, CPU)
    features = Given(expected["features"])
    drafter = HiddenStateDrafter(stage, sequential, features, num_blocks=8, eos_token_ids=())
    known = network.config.draft_token_ids or range(network.config.shape.vocab_size)
    token_ids = expected["token_ids"].tolist()
    drafter.open("r", token_ids[:1], 1, GREEDY)
    num_committed, chosen, wanted = 1, [], []
    drafts = list(zip(expected["anchors"].tolist(), expected["logits"], strict=True))
    if network.config.windows:  # as served they begin at a whole block of the cache
        drafts = [(anchor, of_anchor) for anchor, of_anchor in drafts if anchor % BLOCK_LEN == 0]
    for anchor, of_anchor in drafts[:: max(1, len(drafts) // 20)]:
        drafter.extend("r", token_ids[num_committed : anchor + 1])
        num_committed = anchor + 1
        for k, of_step in enumerate(of_anchor):
            (draft,) = drafter.propose([Demand("r", 1, ahead=tuple(token_ids[anchor + 1 : anchor + 1 + k]))])
            chosen += draft.token_ids
            wanted.append(known[int(of_step.argmax())])
        drafter.check_integrity()
    assert chosen == wanted
