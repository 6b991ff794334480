#!/usr/bin/env bash
# Makes this checkout ready to run and test: checks the host, installs what is missing, builds the programs, fetches the
# guest's kernel. Shared by `make demo`, `make test`, `make serve` and `make bench`. A second run does nothing.
#
#   scripts/setup.sh                 do all of it
#   scripts/setup.sh --print-bin-dir print where the binaries of this checkout go, and do nothing
#
# From the environment: STATE (where the node will keep its things; only its free space is looked at), XDG_CACHE_HOME,
# CARGO_TARGET_DIR, AENV_BIN_DIR (where the binaries go).
set -euo pipefail

readonly RUST_MIN=1.88
readonly KERNEL_MIN=6.8
readonly KERNEL_FULL=6.9
readonly PYTHON_MIN=3.11
readonly UV_MIN=0.5.0
readonly UV_PINNED=0.9.0
readonly FREE_GIB_MIN=8
readonly HOST_BINARIES="aenv-blockd aenv-proxy aenv-launch aenv-storage aenv-image"
readonly STATIC_TARGET=x86_64-unknown-linux-gnu
# command=Debian package, and file=Debian package. gcc links the Rust programs; libc6-dev holds the static C library of
# the guest's daemon. mmdebstrap checks what it downloads against debian-archive-keyring. busybox is a guest of tests;
# umoci is what our image layers are compared with. aenv-image uses libext2fs, which comes with e2fsprogs.
readonly TOOLS="
qemu-system-x86_64=qemu-system-x86 mke2fs=e2fsprogs e2fsck=e2fsprogs ip=iproute2 nft=nftables
mmdebstrap=mmdebstrap zstd=zstd gcc=gcc g++=g++ strip=binutils umoci=umoci"
readonly FILES="
/usr/lib/x86_64-linux-gnu/libc.a=libc6-dev /etc/ssl/certs/ca-certificates.crt=ca-certificates
/usr/share/keyrings/debian-archive-keyring.gpg=debian-archive-keyring /bin/busybox=busybox-static"

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/aenv
# Two checkouts on one machine must not replace each other's binaries, so the folder carries the checkout's path.
bin_dir=${AENV_BIN_DIR:-$cache/bin/$(printf %s "$root" | sha256sum | cut -c1-12)}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$cache/target}
# What was installed here goes first: it is only there where the system's own was missing or too old. Root by way of `su`
# often lacks the sbin folders.
export PATH=$cache/tools/bin:${CARGO_HOME:-$HOME/.cargo}/bin:$PATH:/usr/local/sbin:/usr/sbin:/sbin

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}
# Whether version $1 is at least version $2.
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n1)" = "$2" ]; }

check_host() {
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
        fail "this is $(uname -s) on $(uname -m); a node needs Linux on x86_64 (the client \`aenv\` runs elsewhere too)"
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null && fail "a node makes namespaces, mounts and taps: run it as root, with \`sudo make ...\`"
        fail "a node makes namespaces, mounts and taps: become root first (\`su -\`), then run make again"
    fi
    local kernel
    kernel=$(uname -r | sed 's/[^0-9.].*//')
    at_least "$kernel" $KERNEL_MIN ||
        fail "the kernel is $kernel; $KERNEL_MIN or newer is needed (Debian 13, or linux-image-amd64 of bookworm-backports)"
    at_least "$kernel" $KERNEL_FULL ||
        say "warning: the kernel is $kernel; below $KERNEL_FULL running sandboxes die when aenv-blockd does"
}

# check_device PATH MODULE MAJOR MINOR
check_device() {
    if ! [ -c "$1" ]; then
        modprobe "$2" 2>/dev/null || true
        mkdir -p "$(dirname "$1")"
        [ -c "$1" ] || mknod -m 0666 "$1" c "$3" "$4" 2>/dev/null || true
    fi
    # Opening it is the only proof: a container may show a device that it is not allowed to use.
    [ -c "$1" ] && (exec 3<>"$1") 2>/dev/null ||
        fail "$1 cannot be opened; load the module \`$2\`, or start this container or VM with the device (docker: --device $1)"
}

# check_space FOLDER PURPOSE
check_space() {
    local folder=$1 free_gib
    while ! [ -d "$folder" ]; do folder=$(dirname "$folder"); done
    free_gib=$(($(df --output=avail -B1 "$folder" | tail -n1) >> 30))
    [ "$free_gib" -ge $FREE_GIB_MIN ] ||
        fail "$folder has $free_gib GiB free and $2 needs $FREE_GIB_MIN: free some space, or set $3 to a larger disk"
}

is_debian() {
    # shellcheck disable=SC1091
    (. /etc/os-release 2>/dev/null && [ "${ID-}" = debian ] &&
        { [ "${VERSION_CODENAME-}" = bookworm ] || [ "${VERSION_CODENAME-}" = trixie ]; })
}

missing_packages() {
    local pair
    for pair in $TOOLS; do command -v "${pair%%=*}" >/dev/null || echo "${pair#*=}"; done
    for pair in $FILES; do [ -e "${pair%%=*}" ] || echo "${pair#*=}"; done
    # Only where Rust and uv have to be installed. Debian's python3 alone cannot make an environment.
    command -v cargo >/dev/null || command -v curl >/dev/null || echo curl
    command -v uv >/dev/null || python3 -c 'import ensurepip' 2>/dev/null || echo python3-venv
}

install_packages() {
    local missing
    missing=$(missing_packages | sort -u | tr '\n' ' ')
    [ -n "$missing" ] || return 0
    is_debian ||
        fail "this is not Debian 12 or 13, so nothing is installed for you; what these Debian packages hold is missing: $missing"
    say "installing Debian packages: $missing"
    # shellcheck disable=SC2086
    apt_install $missing >"$log" 2>&1 || {
        say "the package lists are old: apt-get update"
        apt-get update -q >>"$log" 2>&1 || fail "\`apt-get update\` failed; see $log"
        # shellcheck disable=SC2086
        apt_install $missing >>"$log" 2>&1 || fail "\`apt-get install $missing\` failed; see $log"
    }
}

apt_install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"; }

rust_version() { rustc --version 2>/dev/null | cut -d' ' -f2 || true; }

install_rust() {
    command -v cargo >/dev/null && at_least "$(rust_version)" $RUST_MIN && return
    if command -v rustup >/dev/null; then
        say "Rust is $(rust_version) and $RUST_MIN is needed: rustup update stable"
        rustup update stable >"$log" 2>&1 || fail "\`rustup update stable\` failed; see $log"
    else
        say "installing Rust with the installer of https://sh.rustup.rs into ${CARGO_HOME:-$HOME/.cargo}"
        curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs -o "$cache/rustup-init.sh" ||
            fail "https://sh.rustup.rs cannot be reached; install Rust $RUST_MIN or newer yourself"
        sh "$cache/rustup-init.sh" -y -q --no-modify-path --profile minimal -c clippy -c rustfmt >"$log" 2>&1 ||
            fail "the Rust installer failed; see $log"
        rm -f "$cache/rustup-init.sh"
        hash -r
    fi
    at_least "$(rust_version)" $RUST_MIN ||
        fail "\`rustc\` in PATH is $(rust_version); $RUST_MIN or newer is needed (\`rustup default stable\`?)"
}

install_uv() {
    if command -v uv >/dev/null && at_least "$(uv --version | cut -d' ' -f2)" $UV_MIN; then return; fi
    say "installing uv $UV_PINNED with pip into $cache/tools"
    python3 -m venv "$cache/tools" >"$log" 2>&1 && "$cache/tools/bin/pip" install -q "uv==$UV_PINNED" >>"$log" 2>&1 ||
        fail "uv cannot be installed; see $log"
    hash -r
}

build() {
    say "Python packages (uv sync)"
    uv sync --quiet --frozen --extra server ||
        fail "\`uv sync --frozen --extra server\` failed; Python $PYTHON_MIN or newer and the package index are needed"
    say "programs (cargo build)"
    local packages=()
    for name in $HOST_BINARIES; do packages+=(-p "$name"); done
    cargo build --quiet --release --locked "${packages[@]}" || fail "the Rust programs do not build; see the lines above"
    # Static, since it runs in images that may hold no libraries at all.
    RUSTFLAGS="-C target-feature=+crt-static" \
        cargo build --quiet --release --locked -p aenv-envd --target $STATIC_TARGET ||
        fail "the guest's daemon does not build as a static program; see the lines above"
    mkdir -p "$bin_dir"
    for name in $HOST_BINARIES; do install_binary "$CARGO_TARGET_DIR/release/$name"; done
    install_binary "$CARGO_TARGET_DIR/$STATIC_TARGET/release/aenv-envd" strip
}

# install_binary FILE [strip]: by rename, so that a running program keeps its file. The guest's daemon sits in every
# guest's memory: it goes without debug information. The source's identity is kept beside it, as stripping changes bytes.
install_binary() {
    local name=${1##*/} source
    source=$(stat -c '%i %s %y' "$1")
    [ -x "$bin_dir/$name" ] && [ "$(cat "$bin_dir/.$name.source" 2>/dev/null)" = "$source" ] && return
    cp "$1" "$bin_dir/.$name.partial"
    [ "${2-}" != strip ] || strip "$bin_dir/.$name.partial"
    mv -f "$bin_dir/.$name.partial" "$bin_dir/$name"
    printf '%s' "$source" >"$bin_dir/.$name.source"
}

fetch_guest_kernel() {
    compgen -G "$cache/kernels/linux-image-*/release" >/dev/null && return
    say "the guest's kernel (a Debian cloud kernel, unpacked and not installed)"
    local fetch='import sys, pathlib; from agentenv.guest.kernel import fetch_kernel; fetch_kernel(pathlib.Path(sys.argv[1]))'
    uv run --quiet --no-sync python -c "$fetch" "$cache/kernels" >"$log" 2>&1 && return
    say "apt does not know the kernel package yet: apt-get update"
    apt-get update -q >>"$log" 2>&1 || true
    uv run --quiet --no-sync python -c "$fetch" "$cache/kernels" >>"$log" 2>&1 ||
        fail "$(tail -n1 "$log") (more in $log)"
}

# One set-up at a time: two checkouts share the build folder, and a build must not change between build and copy. `flock`
# holds the lock and runs us again without the descriptor, which a killed set-up's compilers would otherwise keep.
take_turn() {
    [ -z "${AENV_SETUP_HAS_TURN-}" ] || return 0
    export AENV_SETUP_HAS_TURN=1
    local status=0
    flock --nonblock --close --conflict-exit-code 200 "$cache/setup.lock" "$root/scripts/setup.sh" || status=$?
    [ $status -eq 200 ] || exit $status
    say "waiting for another set-up on this machine"
    exec flock --close "$cache/setup.lock" "$root/scripts/setup.sh"
}

main() {
    if [ "${1-}" = --print-bin-dir ]; then
        echo "$bin_dir"
        return
    fi
    [ $# -eq 0 ] || fail "unknown argument $1; see the first lines of scripts/setup.sh"
    cd "$root"
    check_host
    mkdir -p "$cache"
    log=$cache/setup.log
    take_turn
    check_space "$cache" "the cache" XDG_CACHE_HOME
    check_space "${STATE:-/var/lib/aenv}" "a node's state" STATE
    install_packages
    check_device /dev/fuse fuse 10 229
    check_device /dev/net/tun tun 10 200
    install_rust
    install_uv
    build
    fetch_guest_kernel
    say "ready after ${SECONDS} s: programs in $bin_dir, Rust $(rust_version), $(uv --version | cut -d' ' -f1,2), host kernel $(uname -r)"
}

# Not when a test sources this file for its functions. `exit` in the same command: bash reads a script as it goes, and an
# update of the checkout meanwhile must not make it run half a line.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    main "$@"
    exit
fi
