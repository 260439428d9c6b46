#!/bin/sh
# compute-sanitizer over one launch of each variant: memory, shared-memory races, misused barriers.
# Exits with 0 only if every tool is clean and memcheck finds the error that is planted for it.
# Usage: tests/gpu/sanitize.sh [tool ...]     (default: memcheck synccheck racecheck)
set -u
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python3}
# torch's allocator hands out pieces of large blocks; without it every tensor is an allocation of its own.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
status=0

# API errors are not reported: cuda-bindings asks the driver for functions that it may not have. Launch errors raise.
check() {
  compute-sanitizer --tool "$1" --error-exitcode 9 --report-api-errors no --kernel-name kernel_substring=patch_embed \
    "$python" "$here/sanitize.py" $2
}

for tool in ${*:-memcheck synccheck racecheck}; do
  if check "$tool" ""; then echo "$tool: clean"; else echo "$tool: FAILED"; status=1; fi
  if [ "$tool" = memcheck ]; then
    if check memcheck --planted 2>&1 | grep -q "Invalid __global__ read"; then echo "memcheck: finds the planted error"; else echo "memcheck: MISSES the planted error"; status=1; fi
  fi
done
exit $status
