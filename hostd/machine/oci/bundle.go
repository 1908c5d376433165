package oci

import (
	"encoding/json"
	"os"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
)

const (
	hostname  = "berth"
	agentPath = "/usr/lib/berth/agent"
	cpuPeriod = 100_000 // microseconds
	shmSize   = "size=512m"

	// CPU shares of one virtual processor: a full one, and the background one
	// of a machine that waits in the pool.
	fullShares       = 1024
	backgroundShares = 64
	// The hard ceiling is this many cores a virtual processor: shares keep
	// neighbours safe, and a browser may burst where cores are idle (a ceiling
	// of one core makes Chrome's start two to three times slower).
	burst = 2
)

// guestCapabilities are what sudo, apt and dpkg need inside. All of them are
// bound to the machine's user namespace. Nothing that configures networks,
// mounts, devices or other processes' memory is in it.
var guestCapabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL",
	"CAP_NET_BIND_SERVICE", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// writeBundle writes config.json of a machine into its folder
// (opencontainers/runtime-spec, config.md).
func (d *Driver) writeBundle(path string, spec machine.Spec) error {
	data, err := json.Marshal(d.bundle(spec))
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o600)
}

func (d *Driver) bundle(spec machine.Spec) *specs.Spec {
	return &specs.Spec{
		Version:  "1.0.2",
		Hostname: hostname,
		Root:     &specs.Root{Path: d.root},
		Process:  process(spec),
		Mounts:   mounts(),
		Linux: &specs.Linux{
			UIDMappings:   idMapping(spec.Slot.UIDBase),
			GIDMappings:   idMapping(spec.Slot.UIDBase),
			Namespaces:    namespaces(spec.Slot.NetNS),
			CgroupsPath:   d.group(spec.ID),
			Resources:     d.resources(spec),
			Seccomp:       seccompProfile(),
			MaskedPaths:   maskedPaths,
			ReadonlyPaths: readonlyPaths,
			// The machine's mounts must not hear of the host's.
			RootfsPropagation: "rprivate",
		},
	}
}

func process(spec machine.Spec) *specs.Process {
	return &specs.Process{
		Args: []string{agentPath, "--kind", string(spec.Kind)},
		Cwd:  "/",
		Env: []string{
			"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
			"HOME=/root", "LANG=C.UTF-8", "container=" + driverName,
		},
		Capabilities: &specs.LinuxCapabilities{
			Bounding: guestCapabilities, Effective: guestCapabilities, Permitted: guestCapabilities,
		},
		Rlimits: []specs.POSIXRlimit{
			{Type: "RLIMIT_NOFILE", Hard: maxFiles(), Soft: min(maxFiles(), 65536)},
			{Type: "RLIMIT_CORE"},
			{Type: "RLIMIT_NPROC", Hard: userProcesses(spec.Pids), Soft: userProcesses(spec.Pids)},
		},
		// sudo in the guest is set-uid.
		NoNewPrivileges: false,
	}
}

// userProcesses limits each user of the guest to fewer processes than the
// machine may have. The difference is the agent's: a Go program that cannot
// make a thread dies, so a fork bomb of the ordinary user would end the
// machine. Root inside can still use it up.
func userProcesses(pids int) uint64 { return uint64(pids - min(64, pids/4)) }

// maxFiles is the most open files a process of the guest may have: what the
// host grants, since raising needs a capability that hostd may lack.
func maxFiles() uint64 {
	var own unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &own); err != nil {
		return 1024
	}
	return min(own.Max, 1<<20)
}

func idMapping(base uint32) []specs.LinuxIDMapping {
	return []specs.LinuxIDMapping{{ContainerID: 0, HostID: base, Size: idRange}}
}

func namespaces(netns string) []specs.LinuxNamespace {
	return []specs.LinuxNamespace{
		{Type: specs.UserNamespace}, {Type: specs.PIDNamespace}, {Type: specs.MountNamespace},
		{Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.CgroupNamespace},
		{Type: specs.NetworkNamespace, Path: netns},
	}
}

// mounts are everything but the root. There is no /sys: the kernel refuses one
// for a network namespace of another user namespace, and the host's would show
// the host; only its processor list is bound, which libraries count cores by.
func mounts() []specs.Mount {
	return []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "noexec", "strictatime", "mode=755", "size=1m"}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", shmSize}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys/devices/system/cpu", Type: "bind", Source: "/sys/devices/system/cpu", Options: []string{"bind", "ro", "nosuid", "noexec", "nodev"}},
	}
}

// resources are the machine's limits. It starts at the background CPU share.
func (d *Driver) resources(spec machine.Spec) *specs.LinuxResources {
	memory := int64(spec.Size.GiB) << 30
	shares := uint64(backgroundShares * spec.Size.VCPU)
	quota, period := int64(burst*spec.Size.VCPU*cpuPeriod), uint64(cpuPeriod)
	pids := int64(spec.Pids)
	r := &specs.LinuxResources{
		Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}, // runc adds null, zero, pts, ...
		Memory:  &specs.LinuxMemory{Limit: &memory},
		CPU:     &specs.LinuxCPU{Shares: &shares, Quota: &quota, Period: &period},
		Pids:    &specs.LinuxPids{Limit: &pids},
	}
	if d.groups.SwapLimited() {
		r.Memory.Swap = &memory // memory and swap together: no swap
	}
	return r
}

// What of /proc tells about the host or reaches it.
var (
	maskedPaths = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kallsyms", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
		"/proc/modules", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",
	}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)
