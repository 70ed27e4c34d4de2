#!/usr/bin/env bash
# The environments of the systems that `outrider bench compare` measures beside this one, in the root of the checkout:
#     benchmarks/compare/setup.sh [vllm] [llamacpp]        without a name: all
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

make_vllm() {
    make setup-vllm # the same environment serves through vLLM
}

make_llamacpp() {
    "${PYTHON:-python3}" -m venv .venv-llamacpp
    .venv-llamacpp/bin/pip install --quiet xllamacpp==2026.10.11549
}

[[ $# -gt 0 ]] || set -- vllm llamacpp
for name in "$@"; do
    if [[ ! -e .venv-$name/.made ]]; then
        "make_$name"
        touch ".venv-$name/.made"
    fi
done
