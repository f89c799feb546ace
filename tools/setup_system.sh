#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs what make needs from the system's packages: as root by itself, else it prints the command.
# Usage: setup_system.sh demo|all|docs|aarch64 PYTHON [CATCH2_INCLUDE]
set -eu
purpose=$1
python=$2
catch2_include=${3:-}
packages=""

need() {
  packages="$packages $1"
}

command -v c++ >/dev/null || need g++
"$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
"$python" -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
  need python3-dev
if [ "$purpose" = all ]; then
  command -v shellcheck >/dev/null || need shellcheck
  command -v pkg-config >/dev/null || need pkg-config
  if [ -z "$catch2_include" ] && [ ! -e /usr/include/catch2/catch.hpp ] &&
    [ ! -e /usr/include/catch2/catch_all.hpp ] && [ ! -e /usr/local/include/catch2 ]; then
    need catch2
  fi
fi
if [ "$purpose" = docs ]; then
  command -v doxygen >/dev/null || need doxygen
fi
if [ "$purpose" = aarch64 ]; then
  command -v aarch64-linux-gnu-g++ >/dev/null || need g++-aarch64-linux-gnu
  # The minus: not what would have this machine start programs for aarch64 by themselves.
  command -v qemu-aarch64 >/dev/null || need "qemu-user qemu-user-binfmt-"
fi

[ -n "$packages" ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "fastamp needs system packages; as root: apt-get install -y$packages" >&2
  exit 1
fi
# Word splitting is the point: one word per package.
# shellcheck disable=SC2086
apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y $packages
