"""What `outrider bench routing --live` says of chains."""

from pathlib import Path

import pytest

from benchmarks.chains import FIXED, POLICY, ChainTimes, config
from cluster.config import ChainPolicy, ModelOptions


def test_the_policy_is_held_against_the_fastest_fixed_chain() -> None:
    seconds = dict(zip((*FIXED, POLICY), ((6.0, 7.0, 9.0), (5.0, 5.0, 5.0), (3.5, 3.5, 3.5), (3.0,), (3.3,)), strict=True))
    turns = ChainTimes((4.0, 3.4), seconds, num_texts=1)
    assert turns.figures["seconds.off"] == 7.0
    assert turns.figures["seconds.lookup>model"] == 3.0
    assert turns.figures["policy_over_fastest"] == pytest.approx(1.1)
    assert turns.figures["identical"] == 1.0
    assert ChainTimes((), seconds, num_texts=2).figures["identical"] == 0.0
    table = turns.table("bf16")
    assert table.rows[0] == ("the policy, at first", "4.00 3.40", 3.7)
    assert [row[0] for row in table.rows[1:]] == ["the target alone", "lookup", "model", "lookup > model", "the policy"]


def test_its_server_knows_nothing_and_keeps_what_it_learns_to_itself(tmp_path: Path) -> None:
    made = config("smollm2-135m", ModelOptions(model="smollm2-135m"), tmp_path)
    assert isinstance(made.router.policy, ChainPolicy)
    assert made.cluster.state.kind == "file"
    assert made.cluster.state.folder == tmp_path
    assert made.target.dtype == "float32"
