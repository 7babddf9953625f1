#!/usr/bin/env bash
# Installs what OpenVINO's GPU plugin needs on a machine without a GPU: Intel's OpenCL runtime for processors, and the layer that shows it as a GPU.
# usage: setup.sh DIR, then `. DIR/env.sh`. Debian packages: ocl-icd-libopencl1 opencl-headers ocl-icd-opencl-dev gcc python3-venv
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=$(mkdir -p "$1" && cd "$1" && pwd)
if [ ! -e "$dir/ocl/lib/libintelocl.so" ]; then
    python3 -m venv "$dir/ocl"
    "$dir/ocl/bin/pip" install -q intel-opencl-rt==2026.2.0 intel-cmplr-lib-rt==2026.2.0
fi
cc -O2 -Wall -Wextra -shared -fPIC -o "$dir/libfakegpu_layer.so" "$here/fakegpu_layer.c"
mkdir -p "$dir/icd"
echo "$dir/ocl/lib/libintelocl.so" > "$dir/icd/intel.icd"
# OpenVINO's own, older TBB would keep the runtime from loading, without a word: the runtime's is preloaded.
cat > "$dir/env.sh" <<EOT
unset LD_LIBRARY_PATH OCL_ICD_FILENAMES
export OCL_ICD_VENDORS=$dir/icd
export OPENCL_LAYERS=$dir/libfakegpu_layer.so
export CL_CONFIG_CPU_FORCE_MAX_MEM_ALLOC_SIZE=4294959104B
export LD_PRELOAD=$dir/ocl/lib/libtbb.so.12
export FAKEGPU_BUILD_OPTIONS=-cl-opt-disable
export TEGULA_OVGPU=1
EOT
echo ". $dir/env.sh"
