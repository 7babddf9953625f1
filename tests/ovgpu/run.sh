#!/usr/bin/env bash
# Runs the backend's GPU tests on the instrument: as it is, with a small limit, and as a discrete GPU.
# usage: run.sh DIR, where setup.sh has been. With a model as second argument SmolLM2's text on the GPU is compared with the processor's;
# `tegula` and the plugins are taken from $TEGULA_BIN (default: target/debug).
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
dir=$(cd "$1" && pwd)
model=${2:-}
cd "$root"
cargo test -q -p tegula-openvino --test gpu --no-run
test_binary=$(cargo test -p tegula-openvino --test gpu --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1)
on_gpu() { (. "$dir/env.sh"; env "$@"); }
on_gpu "$test_binary"
on_gpu FAKEGPU_MAX_ALLOC=67108864 "$test_binary"
on_gpu FAKEGPU_DISCRETE=1 "$test_binary"
if [ -z "$model" ]; then
    echo "SKIPPED: 1 test: no model given, so no text was generated"
    exit 0
fi
bin=${TEGULA_BIN:-$root/target/debug}
export TEGULA_BACKEND_PATH=$bin
text() { "$bin/tegula" run "$model" -p "The capital of France is" -n 8 --temp 0 -c 512 --device "$1" 2>/dev/null; }
want=$(text openvino:0)
got=$(. "$dir/env.sh"; export FAKEGPU_MAX_ALLOC=67108864; text openvino:1)
if [ "$got" != "$want" ]; then
    printf 'the GPU says:\n%s\nthe processor:\n%s\n' "$got" "$want"
    exit 1
fi
echo "GPU and processor give the same text under 64 MiB a buffer"
