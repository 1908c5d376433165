package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// doctorCmd looks at the computer it runs on.
type doctorCmd struct {
	Root string `help:"Look at the system below this folder instead of /." default:"/" hidden:""`
	JSON bool   `name:"json" help:"Print JSON, for programs."`
}

// finding is what doctor says of one thing.
type finding struct {
	Name   string `json:"name"`
	Result string `json:"result"` // ok, weak (Berth works, something is lost) or bad (a driver does not work)
	Found  string `json:"found"`
	Mend   string `json:"mend,omitempty"` // what to do about it
}

const (
	resultOK   = "ok"
	resultWeak = "weak"
	resultBad  = "bad"
)

// Run prints the findings; it fails when one is bad.
func (c doctorCmd) Run(context.Context) error {
	x := examiner{root: c.Root, look: exec.LookPath}
	all := x.examine()
	bad := 0
	for _, f := range all {
		if f.Result == resultBad {
			bad++
		}
	}
	if c.JSON {
		if err := printJSON(map[string]any{"findings": all}); err != nil {
			return err
		}
	} else if err := printFindings(all); err != nil {
		return err
	}
	if bad > 0 {
		return fmt.Errorf("%d of %d things need mending before hostd can run here", bad, len(all))
	}
	return nil
}

func printFindings(all []finding) error {
	var rows [][]string
	for _, f := range all {
		rows = append(rows, []string{f.Result, f.Name, f.Found})
		if f.Mend != "" {
			rows = append(rows, []string{"", "", "→ " + f.Mend})
		}
	}
	return table(out, "\tWHAT\tFOUND", rows)
}

// examiner looks at a host through the files of its kernel.
type examiner struct {
	root string
	look func(string) (string, error)
}

func (x examiner) examine() []finding {
	return []finding{x.kvm(), x.ksm(), x.swap(), x.smt(), x.openFiles(), x.maps(), x.userNamespaces(), x.overlay(), x.tun(), x.cgroups(),
		x.tool("runc", "the oci driver", "runc"), x.tool("qemu-system-x86_64", "the microvm driver", "qemu-system-x86"),
		x.tool("nft", "the firewall of every machine", "nftables")}
}

// read gives a file's text, trimmed; empty when it is not there.
func (x examiner) read(path string) string {
	b, err := os.ReadFile(filepath.Join(x.root, path))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (x examiner) exists(path string) bool {
	_, err := os.Stat(filepath.Join(x.root, path))
	return !errors.Is(err, fs.ErrNotExist)
}

// kvm asks the processor, not the device: /dev/kvm of a host without
// virtualisation opens, and no guest ever gets far on it.
func (x examiner) kvm() finding {
	f := finding{Name: "virtualisation (KVM)", Result: resultOK, Found: "the processor has it and /dev/kvm is there"}
	flags := " " + strings.ReplaceAll(x.read("proc/cpuinfo"), "\t", " ") + " "
	switch {
	case !strings.Contains(flags, " vmx ") && !strings.Contains(flags, " svm "):
		f.Result, f.Found = resultWeak, "the processor does not show vmx or svm"
		f.Mend = "turn virtualisation on in the firmware, or nested virtualisation in the host of this virtual machine; without it machines are containers (--driver oci)"
	case !x.exists("dev/kvm"):
		f.Result, f.Found, f.Mend = resultWeak, "there is no /dev/kvm", "modprobe kvm_intel or kvm_amd"
	}
	return f
}

// ksm: merged pages tell a neighbour by their write times what another has.
func (x examiner) ksm() finding {
	f := finding{Name: "same-page merging (KSM)", Result: resultOK, Found: "off"}
	if on := x.read("sys/kernel/mm/ksm/run"); on == "1" {
		f.Result, f.Found = resultBad, "on: a machine can tell by timing what others have in memory"
		f.Mend = "echo 2 > /sys/kernel/mm/ksm/run, and disable ksmtuned"
	}
	return f
}

// swap: secrets of machines would reach a disk that nobody encrypts.
func (x examiner) swap() finding {
	f := finding{Name: "swap", Result: resultOK, Found: "none, or in memory"}
	for line := range strings.Lines(x.read("proc/swaps")) {
		if device, _, _ := strings.Cut(line, " "); strings.HasPrefix(device, "/") && !strings.HasPrefix(device, "/dev/zram") {
			f.Result, f.Found = resultWeak, "on "+strings.TrimSpace(device)+": machines' memory may reach the disk"
			f.Mend = "swapoff -a, or use an encrypted device"
		}
	}
	return f
}

func (x examiner) smt() finding {
	f := finding{Name: "hyper-threading (SMT)", Result: resultOK, Found: "off"}
	if x.read("sys/devices/system/cpu/smt/active") == "1" {
		f.Result, f.Found = resultWeak, "on: two machines may share a core and its caches"
		f.Mend = "echo off > /sys/devices/system/cpu/smt/control where customers do not trust each other"
	}
	return f
}

// leastFiles is what 250 machines with sockets and tunnels hold, generously.
const leastFiles = 65536

func (x examiner) openFiles() finding {
	f := finding{Name: "open files", Result: resultOK}
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return finding{f.Name, resultWeak, err.Error(), ""}
	}
	f.Found = fmt.Sprintf("up to %d a process", lim.Max)
	if lim.Max < leastFiles {
		f.Result, f.Mend = resultWeak, fmt.Sprintf("LimitNOFILE=%d in hostd's unit, as deploy/ has it", leastFiles)
	}
	return f
}

func (x examiner) maps() finding {
	f := finding{Name: "vm.max_map_count", Result: resultOK, Found: x.read("proc/sys/vm/max_map_count")}
	if n, err := strconv.Atoi(f.Found); err != nil || n < 65530 {
		f.Result, f.Mend = resultWeak, "sysctl -w vm.max_map_count=262144"
	}
	return f
}

func (x examiner) userNamespaces() finding {
	f := finding{Name: "user namespaces", Result: resultOK, Found: x.read("proc/sys/user/max_user_namespaces") + " allowed"}
	if n, _, _ := strings.Cut(f.Found, " "); n == "0" || n == "allowed" {
		f.Result, f.Found, f.Mend = resultBad, "not allowed: containers cannot have ids of their own", "sysctl -w user.max_user_namespaces=65536"
	}
	return f
}

func (x examiner) overlay() finding {
	f := finding{Name: "overlay file system", Result: resultOK, Found: "known to the kernel"}
	if !strings.Contains(x.read("proc/filesystems"), "overlay") {
		f.Result, f.Found, f.Mend = resultBad, "not known to the kernel", "modprobe overlay"
	}
	return f
}

func (x examiner) tun() finding {
	f := finding{Name: "/dev/net/tun", Result: resultOK, Found: "there"}
	if !x.exists("dev/net/tun") {
		f.Result, f.Found, f.Mend = resultWeak, "missing: microVMs have no network", "modprobe tun"
	}
	return f
}

func (x examiner) cgroups() finding {
	f := finding{Name: "control groups", Result: resultOK, Found: "version 2"}
	v2 := strings.Contains(x.read("sys/fs/cgroup/cgroup.controllers"), "memory")
	v1 := x.exists("sys/fs/cgroup/memory") && x.exists("sys/fs/cgroup/pids")
	switch {
	case v2:
	case v1:
		f.Found = "version 1"
	default:
		f.Result, f.Found, f.Mend = resultBad, "no memory controller", "boot with systemd.unified_cgroup_hierarchy=1 and cgroup_enable=memory"
	}
	return f
}

func (x examiner) tool(name, purpose, debian string) finding {
	f := finding{Name: name, Result: resultOK}
	path, err := x.look(name)
	f.Found = path
	if err != nil {
		f.Result, f.Found, f.Mend = resultWeak, "not in PATH; "+purpose+" needs it", "apt-get install "+debian
	}
	return f
}
