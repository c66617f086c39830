#!/usr/bin/env bash
# Collects what real SGLang 0.5.16 needs on a GPU machine that has CUDA 13, Python 3.12 and torch 2.11 but no network:
# DIR/*.whl (about 44 MB) and DIR/sgl_kernel_lean.zip (about 15 MB: the kernel wheel without what these runs do not use).
# usage: collect_wheels.sh DIR
set -euo pipefail
directory=${1:?usage: collect_wheels.sh DIR}
mkdir -p "$directory"
flags=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none --platform any)
for glibc in _2_39 _2_35 _2_34 _2_31 _2_28 _2_27 _2_26 _2_24 _2_17 2014 _2_12 2010 _2_5 1; do
  flags+=(--platform "manylinux${glibc}_x86_64")
done
python3 -m pip download -q "${flags[@]}" -d "$directory" \
  sglang==0.5.16 transformers==5.12.1 tokenizers==0.22.2 apache-tvm-ffi==0.1.11 \
  fastapi==0.165.0 starlette==1.10.0 uvicorn==0.54.0 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection \
  pyzmq==27.3.0 msgspec==0.23.0 orjson==3.13.0 pybase64==1.5.1 setproctitle==1.3.8 openai==2.6.1 distro jiter sniffio \
  compressed-tensors==0.20.1 gguf==0.19.0 dill loguru==0.7.3 partial-json-parser opentelemetry-api \
  ipython==9.18.1 asttokens executing ipython-pygments-lexers jedi matplotlib-inline parso pexpect prompt-toolkit ptyprocess \
  pure-eval stack-data traitlets wcwidth
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
python3 -m pip download -q --no-deps -d "$temporary" sglang-kernel==0.4.5
python3 - "$temporary" "$directory/sgl_kernel_lean.zip" <<'P'
import glob, sys, zipfile

source = zipfile.ZipFile(glob.glob(sys.argv[1] + "/*.whl")[0])
unused = ("flash_ops", "infllm_ops", "flashmla_ops", "/sm100/")
with zipfile.ZipFile(sys.argv[2], "w", zipfile.ZIP_DEFLATED) as lean:
    for item in source.infolist():
        if not any(part in item.filename for part in unused):
            lean.writestr(item.filename, source.read(item))
P
du -ch "$directory"/* | tail -1
