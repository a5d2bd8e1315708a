#!/usr/bin/env bash
# vLLM with lookups that draft inside it, and the same text for the same seed with and without them.
# Run it in an environment with vLLM and paceline[vllm]: examples/vllm_plugin.sh MODEL [PORT]
set -euo pipefail
model=$1 port=${2:-8000}
export PACELINE_COUPLED_SAMPLING=1

vllm serve "$model" --port "$port" \
    --speculative-config '{"method": "custom_class", "model": "paceline.vllm.LocalProposer", "num_speculative_tokens": 4}' &
server=$!
trap 'kill $server' EXIT
until curl -sf "http://127.0.0.1:$port/health"; do
    kill -0 $server
    sleep 2
done

curl -s "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' \
    -d "{\"model\": \"$model\", \"prompt\": \"one, two, three, one, two, three,\", \"max_tokens\": 32, \"temperature\": 0.8, \"seed\": 7}"
echo
curl -s "http://127.0.0.1:$port/metrics" | grep '^vllm:spec_decode_num' || true
