#!/usr/bin/env bash
# Everything that needs a GPU, in one call: tests, then benchmarks, then a short table.
# Uses the python3 at hand; freescale is taken from dist/*.whl if there is one, else built from this tree.
set -uo pipefail
cd "$(dirname "$0")/.."
site=$(mktemp -d)
if ls dist/freescale-*.whl >/dev/null 2>&1; then
    python3 -m zipfile -e "$(ls -t dist/freescale-*.whl | head -n 1)" "$site"
else
    python3 -m pip install -q --no-index --no-deps --no-build-isolation --target "$site" . || exit 1
fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
(cd "$site" && python3 -m freescale doctor)
pytest -q -m gpu tests/test_gpu.py --durations=10
tests=$?
echo
echo "check                     result"
echo "GPU tests                 $([ $tests -eq 0 ] && echo passed || echo "FAILED ($tests)")"
exit $tests
