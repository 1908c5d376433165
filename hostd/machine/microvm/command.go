package microvm

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"

	"github.com/berth-dev/berth/shared/agentlink"
)

// command is QEMU's command line in the making, with the files it inherits. It
// names no path but QEMU's own: all it works on it is given open.
//
// A template's first boot, a clone and a restored machine differ in kernel,
// memory sharing and disk layers only: the devices must be the same for a
// device state to fit.
type command struct {
	args  []string
	files []*os.File
	sets  int
}

func (c *command) add(args ...string) { c.args = append(c.args, args...) }

// fd has the process inherit a file and gives its number there.
func (c *command) fd(f *os.File) int {
	c.files = append(c.files, f)
	return len(c.files) + 2 // after the standard three
}

// node adds what QEMU calls a block device node.
func (c *command) node(n any) {
	text, err := json.Marshal(n)
	if err != nil {
		panic(fmt.Sprintf("marshal %+v: %v", n, err)) // plain values: cannot fail
	}
	c.add("-blockdev", string(text))
}

// file makes QEMU know a file by a set and gives the set's name.
func (c *command) file(f *os.File) string {
	c.sets++
	c.add("-add-fd", fmt.Sprintf("fd=%d,set=%d", c.fd(f), c.sets))
	return fdset(c.sets)
}

// machine adds what all machines of a size have in common.
func (c *command) machine(a accelerator, vcpu int, ram *os.File, ramBytes int64, share bool) {
	c.add("-name", "berth", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-M", "microvm,acpi=on,memory-backend=ram0,suppress-vmdesc=on,mem-merge=off,dump-guest-core=off",
		"-global", "migration.send-configuration=off",
		"-accel", a.args(), "-cpu", a.cpu(), "-smp", strconv.Itoa(vcpu), "-m", fmt.Sprintf("%dM", ramBytes>>20),
		"-object", fmt.Sprintf("memory-backend-file,id=ram0,size=%d,mem-path=/proc/self/fd/%d,share=%s,prealloc=off,merge=off,dump=off",
			ramBytes, c.fd(ram), onOff(share)))
}

// console adds the serial port. Without a file it is a ring in memory: a
// session's guest writes as much as it likes.
func (c *command) console(log *os.File) {
	backend := "ringbuf,id=console,size=65536"
	if log != nil {
		backend = "file,id=console,path=" + c.file(log)
	}
	c.add("-chardev", backend, "-serial", "chardev:console")
}

// onOff is a boolean as QEMU spells it.
func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}

// devices adds disk, network card and source of random numbers; live is the disk's topmost layer.
func (c *command) devices(live string, tap *os.File) {
	// A full host disk is an error in the guest, not a machine that stands still.
	c.add("-device", "virtio-blk-device,id=disk,werror=report,rerror=report,drive="+live)
	c.add("-netdev", fmt.Sprintf("tap,id=net,fd=%d,vhost=off", c.fd(tap)))
	c.add("-device", "virtio-net-device,id=nic,netdev=net,mac="+agentlink.GuestMAC)
	c.add("-object", "rng-builtin,id=random", "-device", "virtio-rng-device,id=rng,rng=random")
}

func (c *command) monitor(socket *os.File) {
	c.add("-chardev", fmt.Sprintf("socket,id=qmp,fd=%d,server=on,wait=off", c.fd(socket)), "-mon", "chardev=qmp,mode=control")
}

// boot has QEMU start a kernel; there may be no initramfs.
func (c *command) boot(kernel, initrd *os.File, params string) {
	c.add("-kernel", fmt.Sprintf("/proc/self/fd/%d", c.fd(kernel)), "-append", params)
	if initrd != nil {
		c.add("-initrd", fmt.Sprintf("/proc/self/fd/%d", c.fd(initrd)))
	}
}

// wait has QEMU wait for a device state, which is then the file with the number.
func (c *command) wait(state *os.File) (fd int) {
	c.add("-S", "-incoming", "defer")
	return c.fd(state)
}

// blockFile is a node of the file below an image. There is no need to sync: a
// disk does not outlive a crash of the host, and a capture syncs.
type blockFile struct {
	Driver   string     `json:"driver"`
	Filename string     `json:"filename"`
	ReadOnly bool       `json:"read-only"`
	Locking  string     `json:"locking"`
	Discard  string     `json:"discard,omitempty"`
	Cache    blockCache `json:"cache"`
}

type blockCache struct {
	NoFlush bool `json:"no-flush"`
}

// blockImage is a node of an image. Backing is always given: what an image's
// header says of files is never followed.
type blockImage struct {
	Driver   string     `json:"driver"`
	Name     string     `json:"node-name"`
	ReadOnly bool       `json:"read-only"`
	Discard  string     `json:"discard,omitempty"`
	Cache    blockCache `json:"cache"`
	File     blockFile  `json:"file"`
	Backing  *string    `json:"backing,omitempty"`
}

func image(driver, name, set string, write bool) blockImage {
	b := blockImage{Driver: driver, Name: name, ReadOnly: !write, Cache: blockCache{NoFlush: true},
		File: blockFile{Driver: "file", Filename: set, ReadOnly: !write, Locking: "off", Cache: blockCache{NoFlush: true}}}
	if write {
		b.Discard, b.File.Discard = "unmap", "unmap"
	}
	return b
}

// over puts an image on another node.
func (b blockImage) over(lower string) blockImage {
	b.Backing = &lower
	return b
}
