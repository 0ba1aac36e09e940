#!/usr/bin/env bash
# Build the emulation for the torch of a Python interpreter: ./build.sh DIR, then: source DIR/env.sh
#   PYTHON (python3)   has a pip-installed torch with CUDA 13; nvcc is not needed
# Exit status 77: this torch is not built for CUDA 13.
set -euo pipefail
mkdir -p "${1:?usage: ./build.sh DIR}"
out=$(cd "$1" && pwd)
python=$(realpath -s "$(command -v "${PYTHON:-python3}")") # a link stays: it is in its environment
cd "$(dirname "${BASH_SOURCE[0]}")"
find_site='import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])'
site=$(CUDALAB='' "$python" -c "$find_site")/..
cuda=$site/nvidia/cu13 nccl=$site/nvidia/nccl
if [[ ! -e $cuda/lib/libcudart.so.13 || ! -e $nccl/lib/libnccl.so.2 ]]; then
    echo "cudalab requires a torch wheel with CUDA 13, which $python does not have" >&2
    exit 77
fi
headers=(-Isrc -Isrc/include -I"$cuda/include" -I"$nccl/include" -I"$site/torch/include")
flags=(-std=c++20 -O2 -fPIC -w "${headers[@]}")
lib=$out/lib
mkdir -p "$lib"

exported() { # the functions of a library, or of a header if no wheel has the library
    case $1 in
        *.h) grep -oE '\bcu[A-Z][A-Za-z0-9_]+' "$1" ;;
        *) nm -D --defined-only "$1" | awk '$2 ~ /[TWi]/ {print $3}' | sed 's/@.*//' | grep -E '^(__)?(cu|nccl)' ;;
    esac | sort -u
}

# library SOURCE SONAME REAL FLAGS...: each function of the real library that SOURCE lacks becomes a
# stub. A stub that no_effect.txt lists returns 0; another one prints its name and aborts.
library() {
    local source=$1 name=$2 real=$3 object=$lib/$2.o
    echo "${name//-/_} { global: *; };" >"$lib/$name.map"
    g++ "${flags[@]}" -c "src/$source.cpp" -o "$object"
    {
        echo 'extern "C" long lab_missing(const char*);'
        comm -23 <(exported "$real") <(nm --defined-only "$object" | awk '{print $3}' | sort -u) |
            awk 'NR == FNR { if ($1 !~ /^#/) harmless[$1] = 1; next }
                 { result = ($1 in harmless) ? "0" : "lab_missing(\"" $1 "\")" }
                 { print "extern \"C\" long " $1 "() { return " result "; }" }' src/no_effect.txt -
    } >"$lib/$name.cpp"
    g++ -fPIC -shared "$object" "$lib/$name.cpp" -o "$lib/$name" "${@:4}" \
        -Wl,-soname,"$name" -Wl,--version-script="$lib/$name.map" -ldl -lpthread
    rm "$object" "$lib/$name".{map,cpp}
}

cudart=(-L"$lib" -l:libcudart.so.13)
g++ "${flags[@]}" -O1 -I"$site/torch/include/torch/csrc/api/include" -c src/ops.cpp -o "$lib/ops.o" &
library cudart libcudart.so.13 "$cuda/lib/libcudart.so.13"
library driver libcuda.so.1 "$cuda/include/cuda.h" "${cudart[@]}"
library cupti libcupti.so.13 "$cuda/lib/libcupti.so.13" "${cudart[@]}"
library nccl libnccl.so.2 "$nccl/lib/libnccl.so.2" "${cudart[@]}"
g++ "${flags[@]}" -shared src/nvml.cpp -o "$lib/libnvidia-ml.so.1" "${cudart[@]}" -Wl,-soname,libnvidia-ml.so.1
wait
g++ -shared "$lib/ops.o" -o "$lib/cudalab_ops.so" -L"$site/torch/lib" -ltorch_cpu -lc10 -lc10_cuda "${cudart[@]}"
rm "$lib/ops.o"
ln -sf libcuda.so.1 "$lib/libcuda.so"
cat >"$out/env.sh" <<END
# Source this file: torch then sees CUDALAB_DEVICES (8) GPUs, whose memory is this machine's.
export CUDALAB="$out" PYTHONPATH="$PWD/python\${PYTHONPATH:+:\$PYTHONPATH}" PATH="$PWD/bin:\$PATH"
export TRITON_LIBCUDA_PATH="$out/lib"
END
echo "built; now: source $out/env.sh"
