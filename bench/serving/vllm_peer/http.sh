#!/usr/bin/env bash
# Starts the two services one after the other, and measures each under closed loops of 1, 32 and 256 clients with
# the load client of bench/serving. Takes about 6 minutes.
set -u
. "$(dirname "$0")/setup.sh"
cd "$SITE"
make_model

# wait_for PID URL SECONDS: until the service answers at URL, or has ended.
wait_for() {
    for _ in $(seq 1 "$3"); do
        kill -0 "$1" 2>/dev/null || return 1
        curl -s -o /dev/null -f "$2" && return 0
        sleep 1
    done
    return 1
}
# stop PID
stop() {
    kill -TERM "$1" 2>/dev/null
    for _ in $(seq 1 30); do
        kill -0 "$1" 2>/dev/null || return
        sleep 1
    done
    kill -9 "$1" 2>/dev/null
}
# load NAME URL
load() {
    PYTHONPATH=$WITH_LIGHTKV timeout 180 python3 -m bench.serving.load --url "$2" --concurrency 1 32 256 \
        --prompt 512 --output 128 --vocab-size 128256 --out "$RESULTS/$1-http.json" | tee "$RESULTS/$1-http.log"
}

PYTHONPATH=$WITH_VLLM python3 -m vllm.entrypoints.cli.main serve "$MODEL" --host 127.0.0.1 --port 8000 \
    --gpu-memory-utilization 0.9 > "$RESULTS/vllm-serve.log" 2>&1 &
server=$!
wait_for "$server" http://127.0.0.1:8000/health 180 && load vllm http://127.0.0.1:8000
stop "$server"

PYTHONPATH=$WITH_LIGHTKV python3 -m lightkv.router.cli serve "$MODEL" --port 8001 > "$RESULTS/lightkv-serve.log" 2>&1 &
server=$!
wait_for "$server" http://127.0.0.1:8001/ready 90 && load lightkv http://127.0.0.1:8001
stop "$server"
