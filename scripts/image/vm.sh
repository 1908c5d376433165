#!/bin/bash
# Builds what a machine with a kernel of its own boots from and prints the
# folder:
#
#   vmlinuz    Debian's cloud kernel
#   initrd     a cpio archive (not compressed: unpacking it costs a slow guest
#              more than reading it) with /init, /modules and their load order;
#              the driver appends another one with /agent and /agent.args
#   disk.ext4  the guest image as a read-only disk, with little room: the driver
#              makes the overlay larger by what a session may write, and /init
#              grows the file system to the overlay's size
#
# The folder's name is the hash of all that goes into it; once there it never
# changes, so a second call only prints. Usage: vm.sh [--path], which prints
# and builds nothing. Needs root, apt with Debian's sources, cpio, mkfs.ext4, go.
# shellcheck source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
image=scripts/image cache=$BERTH_CACHE/vm guest=hostd/machine/microvm/guest

hash() { sha256sum | cut -c1-16; }

# Kernel and disk are the same for every /init, so they have a folder of their own.
parts=$cache/parts-$( (cat $image/vm.sh $image/modules.txt && $image/build.sh --path) | hash)
sources() {
	find "$guest" shared/agentlink -name '*.go' ! -name '*_test.go' -o -name '*.nft' | LC_ALL=C sort | xargs cat
	grep -E '^go |golang.org/x/sys ' go.mod
}
files=$cache/$( (echo "$parts" && sources) | hash)

if [[ ${1:-} == --path || -f $files/initrd ]]; then
	echo "$files"
	exit 0
fi

# get_kernel puts Debian's newest kernel and the modules into a folder, and
# beside them "order", the order to load them in.
get_kernel() { # folder
	local package module
	mkdir "$1/deb" "$1/modules"
	package=$(kernel_package)
	if [[ -z $package ]]; then
		apt-get update
		package=$(kernel_package)
	fi
	[[ -n $package ]] || die "apt on this host has no linux-image-cloud-amd64: add Debian's sources to /etc/apt/sources.list"
	(cd "$1/deb" && apt-get -o APT::Sandbox::User=root download "$package" && dpkg-deb -x ./*.deb .)
	cp "$1"/deb/boot/vmlinuz-* "$1/vmlinuz"
	for module in $(sed 's/#.*//' $image/modules.txt); do add_module "$1" "$module"; done
	rm -r "$1/deb"
}

# kernel_package prints the package that linux-image-cloud-amd64 points at, or
# nothing when apt does not know it.
kernel_package() {
	apt-cache depends linux-image-cloud-amd64 2>/dev/null |
		sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' || true
}

# add_module adds a module after those it depends on.
add_module() { # folder, name
	local found needs
	found=$(find "$1/deb/lib/modules" -name "$2.ko" -o -name "$2.ko.xz")
	[[ -n $found ]] || die "this kernel has no module $2"
	[[ ! -f $1/modules/$2.ko ]] || return 0
	case $found in
	*.xz) xz -dc "$found" ;;
	*) cat "$found" ;;
	esac >"$1/modules/$2.ko"
	needs=$(tr '\0' '\n' <"$1/modules/$2.ko" | sed -n 's/^depends=//p' | tr ',' '\n')
	for found in $needs; do add_module "$1" "$found"; done
	echo "$2.ko" >>"$1/modules/order"
}

# make_disk makes a file system of a folder, just large enough. No journal: a
# machine that does not end properly is never mounted again. Ids and times are
# fixed, so that one image makes one disk wherever folders list alike.
make_disk() { # root folder, file
	local id=be27be27-0000-4000-8000-000000000001 blocks
	blocks=$(find "$1" -printf '%s\n' | awk '{ n += int(($1 + 4095) / 4096) } END { print int(n * 1.03) + 8192 }')
	SOURCE_DATE_EPOCH=1 E2FSPROGS_FAKE_TIME=1 mkfs.ext4 -q -b 4096 -m 0 -O ^has_journal -U $id \
		-E "hash_seed=$id,lazy_itable_init=1,root_owner=0:0" -d "$1" "$2" "$blocks"
}

# make_initrd packs /init and the modules.
make_initrd() { # folder with modules, file
	local root
	root=$(mktemp -d "$cache/.root.XXXXXX")
	mkdir "$root/modules"
	cp "$1"/modules/* "$root/modules/"
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags='-s -w' -o "$root/init" "./$guest"
	find "$root" -exec touch -h -d @1 {} +
	(cd "$root" && find . -mindepth 1 | LC_ALL=C sort | cpio -o -H newc -R 0:0 --reproducible --quiet) >"$2"
	rm -r "$root"
}

build() {
	local new=$cache/.new rootfs
	rm -rf --one-file-system "$cache"/.new "$cache"/.root.* # of a build that was cut off
	rootfs=$($image/build.sh)
	if [[ ! -d $parts ]]; then
		mkdir "$new"
		get_kernel "$new"
		make_disk "$rootfs" "$new/disk.ext4"
		sync -f "$new"
		mv -T "$new" "$parts"
	fi
	mkdir "$new"
	make_initrd "$parts" "$new/initrd"
	ln "$parts/vmlinuz" "$parts/disk.ext4" "$new/"
	chmod 0444 "$new"/*
	sync -f "$new"
	mv -T "$new" "$files"
	sync -f "$cache"
}

need_root "$image/vm.sh"
mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9 # two clones may share the cache
[[ -f $files/initrd ]] || build >&2 9>&-
echo "$files"
