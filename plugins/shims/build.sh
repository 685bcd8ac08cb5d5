#!/usr/bin/env bash
# Build the test-only shims on which the real mori and memfabric engines run without accelerator or RDMA.
#
#   PYTHON=/path/to/venv/bin/python ./build.sh OUT [mori|ascend|all]        (default: all)
#
# The engine package is looked up through PYTHON (default python3). MORI_PYTHON and ASCEND_PYTHON override
# it for one engine, because the two wheels need different Python versions on older systems.
#
# Debian / Ubuntu packages:
#   both     gcc g++ binutils libibverbs-dev
#   mori     libpci3 libdrm-amdgpu1 libnuma1      (the wheel's own needs; real ones, no stand-ins)
#
# Result:
#   OUT/verbs/libibverbs.so        RDMA emulation, used by both
#   OUT/mori/*.so*                 stand-ins for ROCm, gRPC and protobuf
#   OUT/ascend/home/lib64/*.so     fake CANN, under all the names the engine asks for
#   OUT/ascend/root/...            files shown to the engine by libpath_redirect.so
set -euo pipefail

usage() { echo "usage: [PYTHON=...] $0 OUT [mori|ascend|all]" >&2; exit 2; }
fail() { echo "build.sh: $*" >&2; exit 1; }

[ $# -ge 1 ] && [ $# -le 2 ] || usage
target=${2:-all}
case $target in mori | ascend | all) ;; *) usage ;; esac
wants() { [ "$target" = "$1" ] || [ "$target" = all ]; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
mori_python=${MORI_PYTHON:-${PYTHON:-python3}}
ascend_python=${ASCEND_PYTHON:-${PYTHON:-python3}}
export PATH="$PATH:/sbin:/usr/sbin" # ldconfig

# ---- what has to be installed ------------------------------------------------------------------

missing=()
need_command() { command -v "$1" >/dev/null || missing+=("$2"); }
need_library() { ldconfig -p | grep -F "$1 " >/dev/null || missing+=("$2"); }

[ "$(uname -m)" = x86_64 ] || fail "x86-64 Linux only (this is $(uname -m))"
need_command gcc gcc
need_command g++ g++
need_command objdump binutils
if command -v g++ >/dev/null; then
    echo '#include <infiniband/verbs.h>' | g++ -E -x c++ - >/dev/null 2>&1 || missing+=(libibverbs-dev)
fi
if wants mori; then
    need_library libpci.so.3 libpci3
    need_library libdrm_amdgpu.so.1 libdrm-amdgpu1
    need_library libnuma.so.1 libnuma1
fi
[ ${#missing[@]} -eq 0 ] || fail "missing packages; install them with: apt-get install ${missing[*]}"

# Prints the folder of an installed Python package without importing it.
package_folder() { # python package
    "$1" -c 'import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
print(spec.submodule_search_locations[0] if spec else "")' "$2"
}

check_version() { # python distribution version
    local found
    found=$("$1" -c 'import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))' "$2")
    [ "$found" = "$3" ] || echo "build.sh: note: made for $2 $3, found $found" >&2
}

mori_package="" ascend_package=""
if wants mori; then
    mori_package=$(package_folder "$mori_python" mori)
    [ -n "$mori_package" ] ||
        fail "$mori_python has no package mori; install amd-mori==1.2.4 there or set MORI_PYTHON"
    check_version "$mori_python" amd-mori 1.2.4
fi
if wants ascend; then
    ascend_package=$(package_folder "$ascend_python" memfabric_hybrid)
    [ -n "$ascend_package" ] ||
        fail "$ascend_python has no package memfabric_hybrid; install version 1.3.0 there or set ASCEND_PYTHON"
    check_version "$ascend_python" memfabric_hybrid 1.3.0
fi

# ---- build -------------------------------------------------------------------------------------

c_flags=(-std=gnu11 -O2 -Wall -Wextra -fPIC)

build_verbs() {
    mkdir -p "$out/verbs"
    # The engines dlopen "libibverbs.so"; with that soname an already loaded copy satisfies the call.
    g++ -std=c++17 -O2 -Wall -Wextra -fPIC -shared -fvisibility=hidden -pthread -Wl,-soname,libibverbs.so \
        -o "$out/verbs/libibverbs.so" "$here/softverbs.cpp"
}

build_mori() {
    mkdir -p "$out/mori"
    gcc "${c_flags[@]}" -shared -Wl,-soname,librocm_smi64.so.1 -o "$out/mori/librocm_smi64.so.1" \
        "$here/rocm_smi_stub.c"
    "$mori_python" "$here/gen_stubs.py" libraries "$out/mori" "$mori_package"/lib*.so
}

build_ascend() {
    local home=$out/ascend/home root=$out/ascend/root work name
    mkdir -p "$home/lib64"
    work=$(mktemp -d)

    gcc "${c_flags[@]}" -c -o "$work/fake_cann.o" "$here/fake_cann.c"
    "$ascend_python" "$here/gen_stubs.py" functions "$here/fake_cann_symbols.txt" "$work/fake_cann.o" >"$work/stubs.c"
    gcc "${c_flags[@]}" -shared -pthread -o "$home/lib64/libascendcl.so" "$work/fake_cann.o" "$work/stubs.c"
    rm -r "$work"
    for name in ascend_hal runtime ra tsdclient dcmi hccl hcomm nnopbase opapi; do
        ln -sf libascendcl.so "$home/lib64/lib$name.so"
    done

    gcc "${c_flags[@]}" -shared -o "$out/ascend/libpath_redirect.so" "$here/path_redirect.c" -ldl

    # A driver version for which the engine shares memory by virtual-memory handles.
    mkdir -p "$root/usr/local/Ascend/driver"
    echo "Innerversion=V100R001C23SPC005B219" >"$root/usr/local/Ascend/driver/version.info"
    # The sysfs folder of the one device and GID that softverbs reports.
    local port=$root/sys/class/infiniband/kvsoft0/ports/1
    mkdir -p "$port/gid_attrs/types" "$port/gids"
    echo "RoCE v2" >"$port/gid_attrs/types/0"
    echo "0000:0000:0000:0000:0000:ffff:7f00:0001" >"$port/gids/0"
}

echo "building into $out"
build_verbs
if wants mori; then build_mori; fi
if wants ascend; then build_ascend; fi
echo "done"
