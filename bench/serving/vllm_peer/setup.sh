# shellcheck shell=bash
# Sourced by offline.sh and http.sh: unpacks the folder of this file to $SITE (default: vllm_peer in the temporary
# directory), once, and defines the search paths of the two engines. Results go to $RESULTS (default: ./results).
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SITE=${SITE:-${TMPDIR:-/tmp}/vllm_peer}
RESULTS=${RESULTS:-$PWD/results}
MODEL=$SITE/model
mkdir -p "$RESULTS"
export PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 TOKENIZERS_PARALLELISM=false

if [ ! -e "$SITE/done" ]; then
    mkdir -p "$SITE"/{site,vllm,lightkv}
    tar -C "$SITE/site" -xJf "$folder/site.txz"
    tar -C "$SITE/vllm" -xJf "$folder/vllm.txz"
    tar -C "$SITE/lightkv" -xJf "$folder/lightkv.txz"
    xz -dc "$folder/_vllm_fa3_C.abi3.so.xz" > "$SITE/vllm/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
    xz -dc "$folder/_C_stable_libtorch.abi3.so.xz" > "$SITE/vllm/vllm/_C_stable_libtorch.abi3.so"
    cp "$folder"/small/*.so "$SITE/vllm/vllm/"
    touch "$SITE/done"
fi
# vLLM must not find lightkv's folder: it has a top folder called triton_kernels, and vLLM looks for such a package.
WITH_VLLM=$SITE/site:$SITE/vllm
WITH_LIGHTKV=$SITE/site:$SITE/lightkv

# Writes the checkpoint, once: Llama-3-8B's shape, random weights, with room for a prompt of 8,192 tokens.
make_model() {
    if [ ! -e "$MODEL/config.json" ]; then
        PYTHONPATH=$WITH_LIGHTKV python3 -m bench.common.random_checkpoint "$MODEL" --max-length 16384 > "$RESULTS/model.log" 2>&1
    fi
}
