#!/usr/bin/env bash
# Packs vLLM 0.33.0, its dependencies and this checkout's last commit for a GPU machine without a network:
#     assemble.sh FOLDER                    about 50 MB, 3 minutes
#     assemble.sh FOLDER --lightkv-only     packs the last commit alone again, into a folder that has the rest
# The machine needs an NVIDIA Hopper GPU, torch 2.11 or newer and Python 3.12. vLLM pins a newer torch, but its core
# library and its FlashAttention 3 library use torch's stable ABI, and 2.11 has every symbol that dense models and
# mixtures of experts need. FA2, FlashMLA, DeepGEMM and qutlass are left out, because these do not use them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(git -C "$here" rev-parse --show-toplevel)
mkdir -p "$1"
folder=$(cd "$1" && pwd)

git -C "$project" archive HEAD lightkv router triton_kernels bench pyproject.toml | xz > "$folder/lightkv.txz"
cp "$here/run.sh" "$folder/"
if [ "${2:-}" = --lightkv-only ]; then
    du -sh "$folder"
    exit
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

flags=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp)
for version in _2_39 _2_35 _2_34 _2_31 _2_28 _2_27 _2_26 _2_24 _2_17 2014 _2_12 2010 _2_5 1; do
    flags+=(--platform "manylinux${version}_x86_64")
done
python3 -m pip download -q "${flags[@]}" -d wheel vllm==0.33.0
python3 -m pip download -q "${flags[@]}" -d wheels -r "$here/requirements.txt"

mkdir vllm site libraries
unzip -q wheel/vllm-*.whl -x '*.so' 'vllm/vllm-rs' 'vllm/third_party/deep_gemm/include/*' 'vllm/third_party/fmha_sm100/*' -d vllm
unzip -q -j wheel/vllm-*.whl \
    vllm/_C_stable_libtorch.abi3.so vllm/_moe_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so \
    vllm/cumem_allocator.abi3.so vllm/fs_io_C.abi3.so vllm/spinloop.abi3.so -d libraries
for name in _C_stable_libtorch _moe_C_stable_libtorch; do
    python3 "$here/cutfat.py" libraries/$name.abi3.so libraries/core.so
    xz -9 -T2 -c libraries/core.so > "$folder/$name.abi3.so.xz"
done
xz -9 -T2 -c libraries/_vllm_fa3_C.abi3.so > "$folder/_vllm_fa3_C.abi3.so.xz"
mkdir -p "$folder/small"
cp libraries/cumem_allocator.abi3.so libraries/fs_io_C.abi3.so libraries/spinloop.abi3.so "$folder/small/"

for wheel in wheels/*.whl; do unzip -q -o "$wheel" -d site; done
for data in site/*.data/purelib site/*.data/platlib; do
    if [ -d "$data" ]; then cp -r "$data/." site/; fi
done
rm -rf site/mistral_common/data site/pycountry/locales site/*.data
find vllm -path '*swagger*' -name static -prune -exec rm -rf {} +
tar -C site -cJf "$folder/site.txz" .
tar -C vllm -cJf "$folder/vllm.txz" .
du -sh "$folder"
