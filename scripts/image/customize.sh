#!/bin/bash
# Runs as mmdebstrap's customize hook, with the new root as its only argument:
# makes a Debian root into Berth's guest. Everything here is the same for all
# machines; what differs between two of them is set at their start.
set -euo pipefail
root=$1

# The people of the machine: `user` owns all customer work; Chrome runs with
# the group `browser`, by which the slot's firewall tells its traffic apart.
chroot "$root" groupadd --gid 1000 user
chroot "$root" groupadd --gid 900 browser
chroot "$root" useradd --uid 1000 --gid user --create-home --shell /bin/bash user
echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/user"
# What tells programs of the session's proxy (agentlink.ProxyVars): apt under sudo goes by it too.
echo 'Defaults env_keep += "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy"' \
	>>"$root/etc/sudoers.d/user"
chmod 0440 "$root/etc/sudoers.d/user"

# Part of the image, so that an overlay's upper layer makes them writable.
install -d -o 1000 -g 1000 "$root/workspace" "$root/workspace/downloads"

# An empty machine-id is filled at each start: no two machines share one.
: >"$root/etc/machine-id"

echo 'berth' >"$root/etc/hostname"
cat >"$root/etc/hosts" <<'HOSTS'
127.0.0.1 localhost
127.0.1.1 berth
::1       localhost ip6-localhost ip6-loopback
HOSTS
# The slot answers DNS at this address in every machine.
rm -f "$root/etc/resolv.conf"
echo 'nameserver 169.254.77.1' >"$root/etc/resolv.conf"
echo 'LANG=C.UTF-8' >"$root/etc/default/locale"
echo 'LANG=C.UTF-8' >>"$root/etc/environment"

# The guest's own apt uses the mirror that the image was built from.
rm -f "$root"/etc/apt/apt.conf.d/99mmdebstrap

# The whole machine is disposable: let pip install into it.
printf '[global]\nbreak-system-packages = true\n' >"$root/etc/pip.conf"

# Chrome's first page must not wait for a font scan.
chroot "$root" fc-cache --system-only >/dev/null

# Nothing that a running machine makes anew.
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/cache/debconf/*-old \
	"$root"/var/lib/dpkg/*-old "$root"/var/log/* "$root"/tmp/* "$root"/run/*
