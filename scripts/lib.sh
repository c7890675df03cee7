# Shared by the scripts of this folder: system packages, a suitable python, the development environment.
# shellcheck shell=bash
# To be sourced from bash after `set -euo pipefail`. Sets ROOT (the repository); functions say what they set.

# Where the caller stands, or what CDPATH says there, does not matter.
ROOT=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")

# What building pyfuse3 and mounting need.
BUILD_PACKAGES=(fuse3 libfuse3-dev pkg-config gcc)
# What the tests measure with and compare to; and those of ring 3.
TEST_PACKAGES=(fio attr openssl prometheus git rsync cadaver)
LAB_PACKAGES=(stress-ng dbench fsmark postmark rclone)
# The servers of volumes that hosts share: started by the tests and by 'kvfuse cluster-dev', on loopback.
ETCD_PACKAGES=(etcd-server etcd-client)
REDIS_PACKAGES=(redis-server)
CEPH_PACKAGES=(ceph-mon ceph-osd ceph-common librados2 radosgw)
# NFS over a mount: a server and a client that need no support of the kernel, and the tools of its own ones.
NFS_PACKAGES=(nfs-ganesha nfs-ganesha-vfs rpcbind libnfs13 nfs-common nfs-kernel-server)
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

# Succeeds where every user may execute python $1: neither it nor its library is below a folder that is closed to others,
# as those of pyenv and uv in /root are.
_python_is_for_all() {
    "$1" -I - 2>/dev/null <<'PYTHON'
import os, sys, sysconfig
places = [sys.executable, os.__file__]
if sysconfig.get_config_var("Py_ENABLE_SHARED"):
    library = os.path.join(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LDLIBRARY"))
    places += [library] * os.path.exists(library)  # Debian's python has none: its headers' package brings that
places[0] = os.path.realpath(places[0])
for place in map(os.path.realpath, places):
    wanted = 0o005 if place == places[0] else 0o004
    while os.stat(place).st_mode & wanted == wanted and place != "/":
        place, wanted = os.path.dirname(place), 0o001
    if place != "/":
        raise SystemExit(1)
PYTHON
}

# Prints the first python of at least 3.11 that also passes the check $1, or nothing.
_find_python() {
    local name candidate
    for name in python3 python3.13 python3.12 python3.11 python3.14; do
        while IFS= read -r candidate; do
            if _python_is_suitable "$candidate" && "$1" "$candidate"; then
                echo "$candidate"
                return 0
            fi
        done < <(type -ap "$name")
    done
    return 1
}

# Sets PYTHON to an interpreter of at least 3.11 that can make virtual environments and build extensions.
# "ensure_python for-all": one that every user may execute.
ensure_python() {
    local check=true what="python 3.11 or newer"
    if [ "${1-}" = for-all ]; then check=_python_is_for_all what="$what that every user may execute"; fi
    if ! PYTHON=$(_find_python "$check"); then
        command -v apt-get >/dev/null || die "$what is needed: $(type -ap python3 | head -1) is $(python3 --version 2>&1)"
        # A small image has none at all; of Ubuntu 22.04 python3 is 3.10, but 3.11 is one package away.
        ensure_system_packages python3
        PYTHON=$(_find_python "$check") || ensure_system_packages python3.11
        PYTHON=$(_find_python "$check") || die "$what is needed; this system offers no package of it"
    fi
    local version
    version=$("$PYTHON" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    case $PYTHON in
        /usr/bin/*) ensure_system_packages "$version-venv" "$version-dev" ;;
    esac
}

# Sets PY to the python of the development environment (.venv, or $KVFUSE_VENV) with this tree installed in place.
# Made when absent, brought up to date when a pyproject.toml or a source in C changed.
ensure_venv() {
    local venv stamp
    venv=$(realpath -ms -- "${KVFUSE_VENV:-$ROOT/.venv}")
    PY=$venv/bin/python
    stamp=$venv/.kvfuse-$(cat "$ROOT"/{,tools/cluster/,benchmarks/,kubernetes/}pyproject.toml "$ROOT"/kvfuse/native/*.[ch] | cksum | cut -d' ' -f1)
    [ -e "$stamp" ] && [ -x "$PY" ] && return 0
    if [ ! -x "$PY" ]; then
        ensure_python
        say "Making a virtual environment in $venv"
        "$PYTHON" -m venv "$venv"
    fi
    say "Installing kvfuse and its dependencies into $venv"
    (cd "$ROOT" && "$PY" -m pip install --quiet --disable-pip-version-check --use-pep517 \
        -e '.[dev]' -e ./tools/cluster -e './benchmarks[plot]' -e ./kubernetes)
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
