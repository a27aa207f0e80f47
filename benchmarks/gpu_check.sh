#!/usr/bin/env bash
# Everything that needs a GPU, in one call: tests, then benchmarks, then a short table.
# Uses the python3 at hand; freescale is taken from dist/*.whl if there is one, else built from this tree.
# Results (JSON) go to $OUT, or to benchmarks/results/. QUICK=1: benchmarks with --quick. ONLY="a b": only these steps.
set -uo pipefail
cd "$(dirname "$0")/.."
site=$(mktemp -d)
if ls dist/freescale-*.whl >/dev/null 2>&1; then
    python3 -m zipfile -e "$(ls -t dist/freescale-*.whl | head -n 1)" "$site"
else
    python3 -m pip install -q --no-index --no-deps --no-build-isolation --target "$site" . || exit 1
fi
export PYTHONPATH="$site:$PWD/tests/support${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
results=${OUT:-benchmarks/results}
mkdir -p "$results"
(cd "$site" && python3 -m freescale doctor)
summary="check                     result       seconds"
failed=0

check() { # check NAME SECONDS COMMAND...
    local name=$1 limit=$2
    shift 2
    if [ -n "${ONLY:-}" ] && [[ " $ONLY " != *" $name "* ]]; then return; fi
    local began=$SECONDS code
    echo "== $name"
    timeout -s KILL "$limit" "$@"
    code=$?
    [ $code -eq 0 ] || failed=1
    summary+=$'\n'$(printf '%-25s %-12s %s' "$name" "$([ $code -eq 0 ] && echo passed || echo "FAILED ($code)")" $((SECONDS - began)))
}

quick=${QUICK:+--quick}
check tests 540 pytest -q -m gpu tests/kernels/test_gpu.py
check kernels 200 pytest -q -m gpu tests/kernels/test_row_kernels.py tests/kernels/test_sample_packing.py tests/benchmarks/test_hstu_benchmark.py
check hstu 200 pytest -q -m gpu tests/models/test_hstu_attention.py tests/benchmarks/test_hstu_attention_benchmark.py
sanitizer=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 python3)
check sanitizer_rows 200 "${sanitizer[@]}" tests/kernels/test_row_kernels.py
check sanitizer_dispatch 200 "${sanitizer[@]}" tests/kernels/test_sample_packing.py
check train 250 pytest -q -m gpu tests/models/test_train_example.py
check transports 300 pytest -q -m gpu tests/kernels/test_transports.py
check balance 150 pytest -q -m gpu tests/runtime/samples/test_split_batch.py
check contention 150 python3 benchmarks/contention.py $quick --json "$results/contention.json"
check hstu_attention_check 100 python3 benchmarks/hstu_attention.py --check
check hstu_attention 150 python3 benchmarks/hstu_attention.py $quick --json "$results/hstu_attention.json"
check exchange_gpu 200 python3 benchmarks/exchange_gpu.py $quick --json "$results/exchange_gpu.json"
check kernels_gpu 150 python3 benchmarks/kernels_gpu.py $quick --json "$results/kernels_gpu.json"
check host_path 60 python3 benchmarks/host_path.py $quick --json "$results/host_path.json"
check dispatch 150 python3 benchmarks/dispatch.py $quick --json "$results/dispatch.json"
check step_gpu 560 python3 benchmarks/step_gpu.py $quick --ranks 2 --json "$results/step_gpu.json"
echo
echo "$summary"
exit $failed
