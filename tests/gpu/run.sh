#!/usr/bin/env bash
# On a GPU machine: installs the wheels of collect_wheels.sh, then runs run.py with real SGLang and this checkout as plugin.
# usage: tests/gpu/run.sh WHEELS OUT [run.py arguments]
set -uo pipefail
wheels=$(realpath "$1")
out=$(realpath "$2")
shift 2
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
site=${SITE:-/tmp/eagle-site}
exec 9>"$site.lock" && flock 9 # two runs may share a machine with two GPUs
if [ ! -e "$site/.done" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl || exit 1
  (cd "$site" && python3 -m zipfile -e "$wheels/sgl_kernel_lean.zip" .) && touch "$site/.done"
fi
exec 9>&-
# The distribution's metadata as an installer would write it, so that SGLang finds the plugin's entry point.
plugin=/tmp/eagle-plugin-$$
mkdir -p "$plugin/sglang_eagle_exporter-0.dist-info"
ln -s "$root/eagle_exporter" "$plugin/eagle_exporter"
printf 'Metadata-Version: 2.1\nName: sglang-eagle-exporter\nVersion: 0\n' >"$plugin/sglang_eagle_exporter-0.dist-info/METADATA"
printf '[sglang.srt.plugins]\neagle_exporter = eagle_exporter.hooks.plugin:register\n' >"$plugin/sglang_eagle_exporter-0.dist-info/entry_points.txt"
export PYTHONPATH=$plugin:$here/switch_plugin:$here/stubs:$root:$site SGLANG_IS_FLASHINFER_AVAILABLE=false \
  SGLANG_ENABLE_JIT_DEEPGEMM=0 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
exec python3 "$here/run.py" --out "$out" "$@"
