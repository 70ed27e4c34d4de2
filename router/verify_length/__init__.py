"""How many draft tokens of each proposal the next pass verifies, and how many prompt tokens it computes beside them.

One file a policy; `planner.verify` chooses one by its name here. A planner makes its own, so a policy may keep state.
"""

from collections.abc import Callable

from router.verify_length.adaspec import AdaSpecVerification
from router.verify_length.all import VerifyAll
from router.verify_length.context import MIN_CHUNK_LEN, PassRows, VerificationPolicy, VerifyContext
from router.verify_length.dspark import AsynchronousDSparkVerification, DSparkVerification
from router.verify_length.goodput import GoodputVerification
from router.verify_length.outrider import OutriderVerification

VERIFICATION_POLICIES: dict[str, Callable[[], VerificationPolicy]] = {
    "all": VerifyAll,
    "goodput": GoodputVerification,
    "adaspec": AdaSpecVerification,
    "dspark": DSparkVerification,
    "dspark-async": AsynchronousDSparkVerification,
    "outrider": OutriderVerification,
}

__all__ = ["MIN_CHUNK_LEN", "VERIFICATION_POLICIES", "PassRows", "VerificationPolicy", "VerifyContext"]
