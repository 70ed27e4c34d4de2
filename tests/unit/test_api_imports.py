"""The API's process stays small."""

import subprocess
import sys


def test_the_api_needs_neither_torch_nor_ray_nor_transformers() -> None:
    program = (
        "import sys, deploy.api.app, deploy.api.tokenizer\n"
        "print(sorted({'torch', 'ray', 'transformers', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
