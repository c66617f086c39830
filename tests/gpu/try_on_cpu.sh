#!/usr/bin/env bash
# Tries the flow of the part tp without a GPU: two ranks of real SGLang on the CPU, the demo's tiny models, the same driver.
# It shows that the script runs; what it writes are no figures, and summarise.py does not take them.
# usage: tests/gpu/try_on_cpu.sh PYTHON OUT [run.py arguments]   (PYTHON has SGLang 0.5.20 and the exporter)
set -euo pipefail
python=${1:?usage: try_on_cpu.sh PYTHON OUT}
out=${2:?usage: try_on_cpu.sh PYTHON OUT}
shift 2
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
export PYTHONPATH=$here/switch_plugin:$root/eagle_exporter/demo/cpu_standins:$root PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore \
  OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 MODELS=${MODELS:-/dev/shm/eagle-models-cpu} \
  EAGLE_GPU_REGISTRY=${EAGLE_GPU_REGISTRY:-/dev/shm/eagle-gpu-registry-cpu}
exec "$python" "$here/run.py" --out "$out" --parts tp --without-gpu "$@"
