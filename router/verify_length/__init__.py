"""How many draft tokens of each proposal the next pass verifies, and how many prompt tokens it computes beside them.

One file a policy; `planner.verify` chooses one by its name here. A planner makes its own, so a policy may keep state.
"""

from collections.abc import Callable

from router.verify_length.all import VerifyAll
from router.verify_length.context import PassRows, VerificationPolicy, VerifyContext
from router.verify_length.goodput import Goodput

VERIFICATION_POLICIES: dict[str, Callable[[], VerificationPolicy]] = {"all": VerifyAll, "goodput": Goodput}

__all__ = ["VERIFICATION_POLICIES", "PassRows", "VerificationPolicy", "VerifyContext"]
