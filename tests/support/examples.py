"""The shipped configuration files, and machines that each of them fits."""

from pathlib import Path

from cluster.resolve import Inventory, Node

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
MACHINES = {
    "laptop": Inventory((Node("laptop", 4),)),
    "laptop-tp2": Inventory((Node("laptop", 4),)),
    "vllm-cpu": Inventory((Node("laptop", 4),)),
    "vllm-4gpu": Inventory((Node("server", 32, 4),)),
    "one-node-8gpu": Inventory((Node("server", 64, 8),)),
    "dedicated-drafters": Inventory((Node("server", 32, 6),)),
    "multi-node": Inventory(
        (
            Node("big-1", 96, 8, {"outrider/pool": "target"}),
            Node("big-2", 96, 8, {"outrider/pool": "target"}),
            Node("small-1", 32, 2, {"outrider/pool": "drafters"}),
            Node("small-2", 32, 2, {"outrider/pool": "drafters"}),
        )
    ),
}
