#!/usr/bin/env bash
# Makes what OpenVINO's GPU plugin needs on a machine without a GPU: the layer that shows Intel's OpenCL runtime for processors as a GPU.
# usage: setup.sh DIR RUNTIME, RUNTIME being the folder of libintelocl.so (`cargo xtask setup` has it); then `. DIR/env.sh`.
# Debian packages: ocl-icd-opencl-dev (the loader and the headers), gcc
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=$(mkdir -p "$1" && cd "$1" && pwd)
runtime=$(cd "$2" && pwd)
[ -e "$runtime/libintelocl.so" ] || { echo "no libintelocl.so in $runtime" >&2; exit 1; }
mkdir -p "$dir/icd"
# Another run may be using the layer that is there.
cc -O2 -Wall -Wextra -shared -fPIC -o "$dir/libfakegpu_layer.so.part" "$here/fakegpu_layer.c"
mv "$dir/libfakegpu_layer.so.part" "$dir/libfakegpu_layer.so"
echo "$runtime/libintelocl.so" > "$dir/icd/intel.icd"
# OpenVINO's own, older TBB would keep the runtime from loading, without a word: the runtime's is preloaded.
cat > "$dir/env.sh" <<EOT
unset LD_LIBRARY_PATH OCL_ICD_FILENAMES
export OCL_ICD_VENDORS=$dir/icd
export OPENCL_LAYERS=$dir/libfakegpu_layer.so
export CL_CONFIG_CPU_FORCE_MAX_MEM_ALLOC_SIZE=4294959104B
export LD_PRELOAD=$runtime/libtbb.so.12
export FAKEGPU_BUILD_OPTIONS=-cl-opt-disable
export TEGULA_OVGPU=1
EOT
