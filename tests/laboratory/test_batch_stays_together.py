"""A batch is not cut into micro-batches where a barrier with shorter drafts is faster."""

from benchmarks.policy_scenarios import ARMS, Workload, gpu_machine
from simulator.speculation import ArmResult, run_arm


def test_the_default_is_faster_than_a_fixed_length_where_half_a_batch_takes_a_whole_pass() -> None:
    machine = gpu_machine("h100-32b", "qwen-1.5b")  # a pass for 2 requests takes as long as one for 4; 8 drafts take a pass
    workload = Workload("batch 4", 4, 2000)

    def played(name: str) -> ArmResult:
        arm = next(arm for arm in ARMS if arm.name == name)
        return run_arm(machine.spec(), machine.settings(), arm, workload.load(machine), workload.until_s(machine))

    default, two = played("outrider"), played("fixed-2")
    assert default.verified_len < 6.0
    assert default.goodput > two.goodput
