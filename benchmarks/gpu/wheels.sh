#!/usr/bin/env bash
# Collects what a machine with a GPU and no package index lacks, 20 MB of wheels; it has Python 3.12, and torch with CUDA.
#
#   benchmarks/gpu/wheels.sh DIRECTORY
#
# There:  python3 -m pip install --no-index --no-deps --upgrade DIRECTORY/*.whl
set -euo pipefail
out=${1:?usage: wheels.sh DIRECTORY}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p "$out"
packages=(
    transformers compressed-tensors loguru hjson msgpack py-cpuinfo pydantic pydantic_core annotated-types
    typing-inspection jsonargparse docstring_parser typeshed_client pytest pytest-xdist execnet iniconfig pluggy
)
for package in "${packages[@]}"; do
    pinned=$(sed -n "s/^\($package\)\(\[.*\]\)\?==/\1==/p" requirements.txt)
    if [[ -z $pinned ]]; then
        pinned=$package # what another version of one of them needs: see pip's message on that machine
    fi
    pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        -d "$out" "$pinned"
done
# Its source alone is there: a wheel of Python files, whose operators compile at first use.
pip wheel -q --no-deps -w "$out" "$(grep '^deepspeed==' requirements.txt)"
du -sh "$out"
