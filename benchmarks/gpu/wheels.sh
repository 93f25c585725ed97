#!/usr/bin/env bash
# Collects what a machine with a GPU and no package index may lack, 20 MB of wheels, in the versions of requirements.txt.
# It has Python 3.12, torch with CUDA, and what comes with most images of it; what else it lacks is named behind.
#
#   benchmarks/gpu/wheels.sh DIRECTORY [PACKAGE...]
#
# There:  python3 -m pip install --no-index --no-deps --upgrade DIRECTORY/*.whl
set -euo pipefail
out=${1:?usage: wheels.sh DIRECTORY [PACKAGE...]}
shift
out=$(realpath -m "$out")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p "$out"
packages=(
    transformers compressed-tensors loguru hjson msgpack py-cpuinfo pydantic pydantic_core annotated-types
    typing-inspection jsonargparse docstring_parser typeshed_client pytest pytest-xdist execnet iniconfig pluggy "$@"
)
for package in "${packages[@]}"; do
    pinned=$(sed -n "s/^\($package\)\(\[.*\]\)\?==/\1==/p" requirements.txt)
    if [[ -z $pinned ]]; then
        echo "error: requirements.txt has no version of $package" >&2
        exit 1
    fi
    pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        -d "$out" "$pinned"
done
# Its source alone is there: a wheel of Python files, whose operators compile at first use.
pip wheel -q --no-deps -w "$out" "$(grep '^deepspeed==' requirements.txt)"
du -sh "$out"
