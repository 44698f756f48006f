#!/usr/bin/env bash
# Runs both engines in process, one after the other, with their default settings: tokens per second, the time of a
# decode step and the time to the first token. Takes about 5 minutes.
set -u
. "$(dirname "$0")/setup.sh"
cd "$SITE"
make_model

# run ENGINE PATH SECONDS
run() {
    PYTHONPATH=$2 timeout "$3" python3 "$folder/peer_bench.py" "$1" "$MODEL" --out "$RESULTS/$1.json" \
        > "$RESULTS/$1.log" 2>&1 || tail -40 "$RESULTS/$1.log"
    grep -E "^(==|batch|prompt)" "$RESULTS/$1.log"
}
run vllm "$WITH_VLLM" 330
run lightkv "$WITH_LIGHTKV" 200
