# Shared by the scripts of this folder: system packages, a suitable python, the development environment.
# shellcheck shell=bash
# To be sourced from bash after `set -euo pipefail`. Sets ROOT (the repository); functions say what they set.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# What building pyfuse3 and mounting need.
BUILD_PACKAGES=(fuse3 libfuse3-dev pkg-config gcc)
# What the tests measure with and compare to.
TEST_PACKAGES=(fio stress-ng dbench fsmark postmark attr openssl prometheus git rsync)
# The servers of volumes that hosts share: started by the tests and by 'kvfuse cluster-dev', on loopback.
CLUSTER_PACKAGES=(etcd-server etcd-client ceph-mon ceph-osd ceph-common librados2)
# What such a volume is compared with on the same servers.
CLUSTER_BENCH_PACKAGES=(ceph-mds ceph-fuse)
# Reading from other hosts by RDMA: verbs for Python and what drives devices; and the virtual machine that has some.
RDMA_PACKAGES=(python3-pyverbs ibverbs-providers iproute2)
RDMA_VM_PACKAGES=(qemu-system-x86 busybox-static cpio kmod xz-utils dmsetup)

say() { printf '%s\n' "$*" >&2; }
die() { say "${0##*/}: $*"; exit 1; }

# Installs what is missing of the named Debian packages if it may; otherwise says what to type and goes on only
# when nothing is missing. Without dpkg nothing can be known: it names the packages and goes on.
ensure_system_packages() {
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        say "This system has no apt-get. Needed are the equivalents of: $*"
        return 0
    fi
    local package missing=()
    for package in "$@"; do
        dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    _find_root || die "system packages are missing; type: sudo apt-get install ${missing[*]}"
    say "Installing system packages: ${missing[*]}"
    _apt_get update
    _apt_get install --no-install-recommends "${missing[@]}"
}

# Sets AS_ROOT to the words before a command of root's, if there are any.
_find_root() {
    AS_ROOT=()
    [ "$(id -u)" -eq 0 ] && return 0
    AS_ROOT=(sudo -n)
    sudo -n true 2>/dev/null
}

# Quiet unless it fails; never asks.
_apt_get() {
    local output
    # Without a flush for each file: what a power failure breaks here is installed again.
    local options=(-y -q -o DPkg::Lock::Timeout=120 -o Dpkg::Options::=--force-unsafe-io)
    if ! output=$("${AS_ROOT[@]}" env DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" "$@" 2>&1 </dev/null); then
        say "$output"
        die "apt-get $1 failed"
    fi
}

_python_is_suitable() {
    "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null
}

# Prints the first python of at least 3.11, or nothing.
_find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.14; do
        if command -v "$candidate" >/dev/null && _python_is_suitable "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

# Sets PYTHON to an interpreter of at least 3.11 that can make virtual environments and build extensions.
ensure_python() {
    if ! PYTHON=$(_find_python); then
        command -v apt-get >/dev/null || die "python 3.11 or newer is needed: $(python3 --version 2>&1)"
        # A small image has none at all; of Ubuntu 22.04 python3 is 3.10, but 3.11 is one package away.
        ensure_system_packages python3
        PYTHON=$(_find_python) || ensure_system_packages python3.11
        PYTHON=$(_find_python) || die "python 3.11 or newer is needed; this system offers no package of it"
    fi
    local version
    version=$("$PYTHON" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    case $PYTHON in
        /usr/bin/*) ensure_system_packages "$version-venv" "$version-dev" ;;
    esac
}

# Sets PY to the python of the development environment (.venv, or $KVFUSE_VENV) with this tree installed in place.
# Made when absent, brought up to date when pyproject.toml changed.
ensure_venv() {
    local venv=${KVFUSE_VENV:-$ROOT/.venv} stamp
    PY=$venv/bin/python
    stamp=$venv/.kvfuse-$(cat "$ROOT/pyproject.toml" "$ROOT/kvfuse/_native.c" "$ROOT/kvfuse/_fusewire.c" | cksum | cut -d' ' -f1)
    [ -e "$stamp" ] && [ -x "$PY" ] && return 0
    if [ ! -x "$PY" ]; then
        ensure_python
        say "Making a virtual environment in $venv"
        "$PYTHON" -m venv "$venv"
    fi
    say "Installing kvfuse and its dependencies into $venv"
    (cd "$ROOT" && "$PY" -m pip install --quiet --disable-pip-version-check -e '.[dev]')
    rm -f "$venv"/.kvfuse-*
    touch "$stamp"
}

# Links Debian's pyverbs into the environment of python $1, if it was built for such a python. It is no package of PyPI
# that would work here: that one needs a libibverbs of its own version.
link_pyverbs() {
    local built=/usr/lib/python3/dist-packages/pyverbs site suffix
    suffix=$("$1" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
    [ -e "$built/device$suffix" ] || return 0
    site=$("$1" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    [ -e "$site/pyverbs" ] || ln -sfn "$built" "$site/pyverbs"
}
