#!/usr/bin/env bash
# Measures vLLM and lightkv on this machine, from the folder of this file, which assemble.sh packed:
#     run.sh --out FILE           takes the options of compare.py; --help lists them
# Unpacks the folder to $SITE first (default: vllm_peer in the temporary directory). What is unpacked already stays,
# and lightkv is unpacked again when lightkv.txz has changed.
set -euo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
SITE=${SITE:-${TMPDIR:-/tmp}/vllm_peer}
mkdir -p "$SITE"

if [ ! -e "$SITE/done" ]; then
    rm -rf "$SITE"/{site,vllm}
    mkdir -p "$SITE"/{site,vllm/vllm/vllm_flash_attn}
    jobs=()
    tar -C "$SITE/site" -xJf "$folder/site.txz" & jobs+=($!)
    tar -C "$SITE/vllm" -xJf "$folder/vllm.txz" & jobs+=($!)
    xz -dc "$folder/_vllm_fa3_C.abi3.so.xz" > "$SITE/vllm/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so" & jobs+=($!)
    for name in _C_stable_libtorch _moe_C_stable_libtorch; do
        xz -dc "$folder/$name.abi3.so.xz" > "$SITE/vllm/vllm/$name.abi3.so" & jobs+=($!)
    done
    for job in "${jobs[@]}"; do wait "$job"; done
    cp "$folder"/small/*.so "$SITE/vllm/vllm/"
    touch "$SITE/done"
fi
if ! cmp -s "$folder/lightkv.txz" "$SITE/lightkv.txz"; then
    rm -rf "$SITE/lightkv"
    mkdir -p "$SITE/lightkv"
    tar -C "$SITE/lightkv" -xJf "$folder/lightkv.txz"
    # git archive stores the commit in the header of the archive.
    python3 -c 'import sys, tarfile; print(tarfile.open(sys.argv[1]).pax_headers.get("comment", "unknown"))' \
        "$folder/lightkv.txz" > "$SITE/lightkv/COMMIT"
    cp "$folder/lightkv.txz" "$SITE/lightkv.txz"
fi

# There is no network; FlashInfer's sampler is not packed.
# Steps are traced in vLLM's worker, to which it lets functions be sent only so.
export VLLM_ALLOW_INSECURE_SERIALIZATION=1
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0
export PYTHONPATH=$SITE/site:$SITE/lightkv
exec python3 -P -u -m bench.serving.vllm_peer.compare --site "$SITE" --model "$SITE/model" --logs "$SITE/logs" "$@"
