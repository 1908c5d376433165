package oci

import (
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/cgroup"
	"github.com/berth-dev/berth/shared/session"
)

func bundleOf(h cgroup.Layout) *specs.Spec {
	d := &Driver{cfg: Config{Home: "/h", Cgroup: "/berth/x"}, groups: h, root: "/mnt"}
	return d.bundle(machine.Spec{ID: "ab", Kind: session.Both, Size: session.Size{VCPU: 2, GiB: 3}, Pids: 1024,
		Slot: machine.Slot{NetNS: "/run/netns/s", UIDBase: 1 << 20}})
}

func TestBundleIsolates(t *testing.T) {
	b := bundleOf(cgroup.V2("/sys/fs/cgroup"))
	kinds := map[specs.LinuxNamespaceType]string{}
	for _, ns := range b.Linux.Namespaces {
		kinds[ns.Type] = ns.Path
	}
	for _, kind := range []specs.LinuxNamespaceType{specs.UserNamespace, specs.PIDNamespace, specs.MountNamespace, specs.IPCNamespace, specs.UTSNamespace, specs.CgroupNamespace, specs.NetworkNamespace} {
		path, ok := kinds[kind]
		if !ok || (path != "") != (kind == specs.NetworkNamespace) {
			t.Errorf("%s namespace: %q, %v", kind, path, ok)
		}
	}
	for _, forbidden := range []string{"CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_SYS_PTRACE", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SYS_MODULE", "CAP_DAC_READ_SEARCH"} {
		if slices.Contains(b.Process.Capabilities.Bounding, forbidden) {
			t.Errorf("%s is granted", forbidden)
		}
	}
	for _, m := range b.Mounts {
		if m.Type == "bind" && !slices.Contains(m.Options, "ro") {
			t.Errorf("%s of the host is bound for writing", m.Source)
		}
	}
}

func TestBundleLimits(t *testing.T) {
	r := bundleOf(cgroup.V2("/sys/fs/cgroup")).Linux.Resources
	if *r.Memory.Limit != 3<<30 || *r.Memory.Swap != 3<<30 || *r.Pids.Limit != 1024 {
		t.Errorf("memory %d, with swap %d, pids %d", *r.Memory.Limit, *r.Memory.Swap, *r.Pids.Limit)
	}
	if *r.CPU.Shares != 2*backgroundShares || *r.CPU.Quota != 4*cpuPeriod {
		t.Errorf("shares %d, quota %d", *r.CPU.Shares, *r.CPU.Quota)
	}
	// Without memsw files a swap limit would make runc fail.
	if r := bundleOf(cgroup.V1(map[string]string{"memory": "/missing"})).Linux.Resources; r.Memory.Swap != nil {
		t.Error("limits swap where the kernel cannot")
	}
	for pids, want := range map[int]uint64{1024: 960, 100: 75, 1: 1} {
		if got := userProcesses(pids); got != want {
			t.Errorf("of %d processes a user gets %d, want %d", pids, got, want)
		}
	}
}

// verdict is the action of the profile's first rule that names a call without
// looking at arguments, else the default.
func verdict(p *specs.LinuxSeccomp, call string) specs.LinuxSeccompAction {
	for _, rule := range p.Syscalls {
		if len(rule.Args) == 0 && slices.Contains(rule.Names, call) {
			return rule.Action
		}
	}
	return p.DefaultAction
}

func TestSeccompList(t *testing.T) {
	p := seccompProfile()
	for call := range strings.FieldsSeq("bpf perf_event_open kexec_load init_module finit_module delete_module add_key keyctl request_key " +
		"userfaultfd io_uring_setup mount umount2 pivot_root move_mount open_tree fsopen mount_setattr swapon reboot settimeofday " +
		"clock_settime quotactl open_by_handle_at vm86 acct iopl setns clone3 clone unshare socket personality some_future_call") {
		if v := verdict(p, call); v != specs.ActErrno {
			t.Errorf("%s without further test: %s", call, v)
		}
	}
	for call := range strings.FieldsSeq("read execve chroot seccomp prctl setresuid ptrace") {
		if v := verdict(p, call); v != specs.ActAllow {
			t.Errorf("%s: %s", call, v)
		}
	}
	seen := map[string]bool{}
	for _, call := range append(strings.Fields(allowedCalls), strings.Fields(refusedCalls)...) {
		if seen[call] {
			t.Errorf("%s is listed twice", call)
		}
		seen[call] = true
	}
}

func TestSeccompArguments(t *testing.T) {
	p := seccompProfile()
	allows := func(call string, args ...uint64) bool {
		for _, rule := range p.Syscalls {
			if slices.Contains(rule.Names, call) && rule.Action == specs.ActAllow && matches(rule.Args, args) {
				return true
			}
		}
		return false
	}
	for _, c := range []struct {
		call string
		args []uint64
		want bool
	}{
		{"clone", []uint64{unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET | uint64(unix.SIGCHLD)}, true},
		{"clone", []uint64{unix.CLONE_NEWUSER | unix.CLONE_NEWNS}, false},
		{"unshare", []uint64{unix.CLONE_NEWUSER | unix.CLONE_NEWNET}, true},
		{"unshare", []uint64{unix.CLONE_NEWNS}, false},
		{"unshare", []uint64{unix.CLONE_NEWTIME}, false},
		{"socket", []uint64{unix.AF_INET6, unix.SOCK_STREAM, 0}, true},
		{"socket", []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE}, true},
		{"socket", []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER}, false},
		{"socket", []uint64{unix.AF_ALG, 0, 0}, false},
		{"socket", []uint64{unix.AF_PACKET, 0, 0}, false},
		{"socket", []uint64{unix.AF_VSOCK, 0, 0}, false},
		{"personality", []uint64{0xffffffff}, true},
		{"personality", []uint64{0x0400000}, false}, // READ_IMPLIES_EXEC
	} {
		if got := allows(c.call, c.args...); got != c.want {
			t.Errorf("%s%v: %v", c.call, c.args, got)
		}
	}
}

func matches(rules []specs.LinuxSeccompArg, args []uint64) bool {
	for _, a := range rules {
		switch v := args[a.Index]; {
		case a.Op == specs.OpEqualTo && v != a.Value, a.Op == specs.OpMaskedEqual && v&a.Value != a.ValueTwo:
			return false
		}
	}
	return true
}
