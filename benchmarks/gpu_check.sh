#!/usr/bin/env bash
# Everything that needs a GPU, in one call: tests, several at a time, then benchmarks, one by one, then a short table.
# Uses the python3 at hand; freescale is taken from dist/*.whl if there is one, else built from this tree.
# Results (JSON) go to $OUT, or to benchmarks/results/; logs of the tests to $OUT. QUICK=1: benchmarks with --quick.
# PART=1, PART=2: one half of it, each done within BUDGET seconds (540): most tests and the short benchmarks; other
# people's models and the long benchmarks, whole steps with --quick. ONLY="a b": only these checks. JOBS: tests at a time (a fourth of the
# cores).
set -uo pipefail
cd "$(dirname "$0")/.."
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if ls dist/freescale-*.whl >/dev/null 2>&1; then
    python3 -m zipfile -e "$(ls -t dist/freescale-*.whl | head -n 1)" "$site"
else
    python3 -m pip install -q --no-index --no-deps --no-build-isolation --target "$site" . || exit 1
fi
export PYTHONPATH="$site:$PWD/tests/support${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
results=${OUT:-benchmarks/results}
logs=${OUT:-$site}
mkdir -p "$results"
(cd "$site" && python3 -m freescale doctor)
summary="check                     result       seconds"
failed=0
budget=${BUDGET:-${PART:+540}}
jobs=${JOBS:-$(($(nproc --all) / 4))} # not nproc alone, which says what OMP_NUM_THREADS says
at_once=() # names of the tests that were started

left() { echo $((${budget:-100000} - SECONDS)); }

wanted() { # wanted NAME PART
    if [ -n "${ONLY:-}" ]; then [[ " $ONLY " == *" $1 "* ]]; else [ "${PART:-$2}" = "$2" ]; fi
}

limited() { # limited SECONDS COMMAND...: for at most so long, and not longer than there is time
    local limit=$1 most
    shift
    most=$(($(left) - 5))
    if [ "$most" -lt 20 ]; then
        echo "no time left"
        return 124
    fi
    timeout -s KILL $((limit < most ? limit : most)) "$@"
}

report() { # report NAME CODE SECONDS
    [ "$2" -eq 0 ] || failed=1
    summary+=$'\n'$(printf '%-25s %-12s %s' "$1" "$([ "$2" -eq 0 ] && echo passed || echo "FAILED ($2)")" "$3")
}

start() { # start NAME PART SECONDS COMMAND...: beside others
    local name=$1
    wanted "$name" "$2" || return 0
    shift 2
    while [ "$(jobs -rp | wc -l)" -ge $((jobs > 0 ? jobs : 1)) ]; do wait -n; done
    {
        local began=$SECONDS code
        limited "$@" >"$logs/$name.log" 2>&1
        code=$?
        echo "$code $((SECONDS - began))" >"$site/$name.result"
    } &
    at_once+=("$name")
}

finish() { # what was started
    local name
    wait
    for name in ${at_once[@]+"${at_once[@]}"}; do
        echo "== $name"
        tail -n 40 "$logs/$name.log"
        report "$name" $(cat "$site/$name.result" 2>/dev/null || echo 1 0)
    done
    at_once=()
}

check() { # check NAME PART SECONDS COMMAND...: alone
    local name=$1 began=$SECONDS
    wanted "$name" "$2" || return 0
    shift 2
    echo "== $name"
    limited "$@"
    report "$name" $? $((SECONDS - began))
}

quick=${QUICK:+--quick}
gpu=(pytest -v --no-header --durations=10 -m gpu)
sanitizer=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 python3)
training=tests/kernels/test_gpu.py::test_every_transport_gives_the_same_bits
start tests_transports_4 1 400 "${gpu[@]}" "${training}[4]"
start tests_nccl 1 400 "${gpu[@]}" tests/kernels/test_nccl.py
start tests_transports_2 1 400 "${gpu[@]}" "${training}[2]"
native=tests/kernels/test_gpu.py
start tests_native 1 300 "${gpu[@]}" $native -k "equals"
start tests_bits 1 300 "${gpu[@]}" $native -k "not equals and not compressed" --deselect "$training"
start tests_compressed 1 300 "${gpu[@]}" $native -k "compressed"
start tests_tables 1 200 "${gpu[@]}" tests/compile/test_kernel_launches.py tests/runtime/tables/test_plan_block.py tests/runtime/tables/test_fbgemm_table.py tests/runtime/tables/test_fbgemm_bags.py tests/runtime/tables/test_native_adam.py
start background 1 200 "${gpu[@]}" tests/passes/test_move_background.py
start torchrec 1 400 "${gpu[@]}" tests/kernels/test_torchrec_gpu.py tests/kernels/test_gpu_loops.py tests/models/test_torchrec_own.py
tables=tests/runtime/tables/test_torchrec_on_gpu.py
start torchrec_pooled 1 250 "${gpu[@]}" "$tables" -k "(pooled or columns) and not adam"
start torchrec_adam 1 250 "${gpu[@]}" "$tables" -k adam
start torchrec_tables 1 250 "${gpu[@]}" "$tables" -k "not pooled and not columns and not adam and not grid"
start torchrec_grid 1 250 "${gpu[@]}" "$tables" -k grid
zoo=tests/models/test_zoo.py
some="Autocast or BERT4Rec or DLRM or GRU4Rec or HSTU"
start zoo_some 2 250 "${gpu[@]}" "$zoo" -k "not inductor and ($some)"
start zoo_others 2 250 "${gpu[@]}" "$zoo" -k "not inductor and not ($some)"
start zoo_inductor 2 250 "${gpu[@]}" "$zoo" -k inductor
start streaming 2 250 "${gpu[@]}" tests/models/test_streaming_program.py
start nixl 1 200 "${gpu[@]}" tests/kernels/test_nixl.py
start transports 1 300 "${gpu[@]}" tests/kernels/test_transports.py
start kernels 1 300 "${gpu[@]}" tests/kernels/test_row_kernels.py tests/kernels/test_compression_kernels.py tests/kernels/test_compression.py tests/kernels/test_rounding.py tests/kernels/test_large_tables.py tests/kernels/test_sample_packing.py tests/benchmarks/test_hstu_benchmark.py
start hstu 1 200 "${gpu[@]}" tests/models/test_hstu_attention.py tests/models/test_persrec_attention.py tests/benchmarks/test_hstu_attention_benchmark.py
start train 1 250 "${gpu[@]}" tests/models/test_train_example.py
start sanitizer_rows 1 300 "${sanitizer[@]}" tests/kernels/test_row_kernels.py
start sanitizer_dispatch 1 300 "${sanitizer[@]}" tests/kernels/test_sample_packing.py
start dense 1 200 "${gpu[@]}" tests/runtime/test_dense_gradients.py tests/runtime/tables/test_ddp.py
start balance 1 300 "${gpu[@]}" tests/runtime/samples/test_split_batch.py tests/runtime/test_meter.py
finish
check kernels_gpu 1 150 python3 benchmarks/kernels_gpu.py $quick --json "$results/kernels_gpu.json"
check compress_kernels 1 60 python3 benchmarks/compress.py --kernels --json "$results/compress_kernels.json"
check dispatch 1 150 python3 benchmarks/dispatch.py $quick --json "$results/dispatch.json"
check meter_gpu 1 90 python3 benchmarks/meter_gpu.py $quick --json "$results/meter_gpu.json"
check hstu_attention_check 1 100 python3 benchmarks/hstu_attention.py --check
check hstu_attention 1 150 python3 benchmarks/hstu_attention.py $quick --json "$results/hstu_attention.json"
check contention 2 250 python3 benchmarks/contention.py $quick --json "$results/contention.json"
check exchange_gpu 2 200 python3 benchmarks/exchange_gpu.py $quick --json "$results/exchange_gpu.json"
steps=(--json "$results/step_torchrec.json")
if [ -n "$budget" ]; then steps+=(--quick --seconds $(($(left) - 25))); fi
check step_torchrec 2 580 python3 benchmarks/step_torchrec.py $quick "${steps[@]}"
echo
echo "$summary"
exit $failed
