package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/hostd/network"
	"github.com/berth-dev/berth/shared/agentlink"
)

// The machine under test: the files of scripts/image/vm.sh in a real slot,
// with this test binary as its agent. Beside the slot is a web host with an
// address in an opened network and one in a closed network.
const (
	slotName  = "bgt"
	slotNet   = "10.124.0.0/24"
	webNS     = "bgtweb"
	webLink   = "bgtweb0"
	webNet    = "10.224.0.0/24"
	webHost   = "10.224.0.1"
	webAddr   = "10.224.0.2"
	closed    = "10.225.0.2"
	webPort   = ":4007"
	agentWord = "the agent is here"
)

// bootWait bounds a boot under emulation on a busy machine.
const bootWait = 2 * time.Minute

// seen is what the machine tells of itself, on its console.
type seen struct {
	Args, Mounts []string
	Hostname     string
	MachineID    string
	DiskBytes    uint64
	FreeBytes    uint64
	Limits       map[string]uint64
	Dials        map[string]string // "group address" → result
}

func TestMain(m *testing.M) {
	switch {
	case os.Getpid() == 1:
		beAgent()
	case os.Getenv(dialsEnv) != "":
		dialAll()
	default:
		os.Exit(m.Run())
	}
}

func TestBoot(t *testing.T) {
	needRoot(t)
	files := bootFiles(t)
	slot := makeSlot(t)
	makeWeb(t)
	dir := t.TempDir()
	const room = 1 << 30
	disk := overlay(t, dir, files, room)
	console := filepath.Join(dir, "console")
	qemu := exec.Command("nsenter", "--net="+slot.Info().NetNS, "qemu-system-x86_64", "-M", "microvm,acpi=on", "-accel", "tcg,thread=multi",
		"-cpu", "max", "-smp", "2", "-m", "768", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "file:"+console,
		"-kernel", filepath.Join(files, "vmlinuz"), "-initrd", withAgent(t, dir, files),
		"-append", "console=ttyS0 quiet panic=-1 cryptomgr.notests lpj=4000000 no_timer_check sysctl.kernel.threads-max=1152 tsc_early_khz="+tscKHz(t),
		"-blockdev", "driver=file,node-name=file,filename="+disk, "-blockdev", "driver=qcow2,node-name=disk,file=file",
		"-device", "virtio-blk-device,drive=disk", "-object", "rng-builtin,id=rng", "-device", "virtio-rng-device,rng=rng",
		"-netdev", "tap,id=net,ifname="+agentlink.TapName+",script=no,downscript=no", "-device", "virtio-net-device,netdev=net,mac="+agentlink.GuestMAC)
	var complaints bytes.Buffer
	qemu.Stderr = &complaints
	if err := qemu.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = qemu.Wait() }()
	t.Cleanup(func() { _ = qemu.Process.Kill(); <-ended })
	if word := greet(t, slot, ended); word != agentWord {
		t.Errorf("the agent's listener said %q", word)
	}
	select {
	case <-ended:
	case <-time.After(bootWait):
	}
	text, err := os.ReadFile(console)
	if err != nil {
		t.Fatal(err)
	}
	_, report, ok := strings.Cut(string(text), "SEEN ")
	if !ok {
		t.Fatalf("the machine told nothing: %s%s", text, &complaints)
	}
	var got seen
	if err := json.NewDecoder(strings.NewReader(report)).Decode(&got); err != nil {
		t.Fatalf("%v: %s", err, report)
	}
	check(t, got, room)
}

func check(t *testing.T, got seen, room uint64) {
	t.Helper()
	if want := []string{"--kind", "shell", ""}; fmt.Sprintf("%q", got.Args) != fmt.Sprintf("%q", want) {
		t.Errorf("arguments %q", got.Args)
	}
	if got.Hostname != hostname || len(got.MachineID) != 32 {
		t.Errorf("name %q, machine id %q", got.Hostname, got.MachineID)
	}
	for _, want := range []string{"/ ext4", "/proc proc", "/sys sysfs", "/sys/fs/cgroup cgroup2", "/dev devtmpfs", "/dev/pts devpts", "/dev/shm tmpfs", "/run tmpfs"} {
		if !strings.Contains(strings.Join(got.Mounts, "\n")+"\n", " "+want+" ") {
			t.Errorf("no %q in %q", want, got.Mounts)
		}
	}
	if got.FreeBytes < room {
		t.Errorf("%d bytes are free of %d, want %d", got.FreeBytes, got.DiskBytes, room)
	}
	if n := got.Limits["nproc"]; n < 800 || n > 1100 || got.Limits["nofile"] != maxFiles {
		t.Errorf("limits %v", got.Limits)
	}
	for row, want := range map[string]string{
		"1000 " + webAddr + webPort:            "connected",
		"1000 " + closed + webPort:             "refused",
		"1000 " + agentlink.SlotAddr + ":78":   "connected",
		"1000 " + agentlink.SlotAddr + ":53":   "connected",
		"1000 " + agentlink.GuestAddr + ":77":  "refused", // the agent is hostd's alone
		"1000 127.0.0.1:8000":                  "connected",
		"900 127.0.0.1:8000":                   "connected",
		"900 " + agentlink.SlotAddr + ":78":    "connected",
		"900 " + agentlink.SlotAddr + ":53":    "refused",
		"900 " + agentlink.GuestAddr + ":77":   "refused",
		"900 " + agentlink.GuestAddr + ":8000": "refused",
		"900 " + webAddr + webPort:             "refused",
		"0 " + webAddr + webPort:               "connected",
		"0 " + closed + webPort:                "refused",
	} {
		if got.Dials[row] != want {
			t.Errorf("%s: %q, want %s", row, got.Dials[row], want)
		}
	}
}

// bootFiles is the folder that vm.sh built.
func bootFiles(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("../../../../scripts/image/vm.sh", "--path").Output()
	if err != nil {
		t.Fatal(err)
	}
	dir := strings.TrimSpace(string(out))
	_, lacks := os.Stat(filepath.Join(dir, "initrd"))
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		lacks = err
	}
	if lacks != nil && os.Getenv("CI") == "true" {
		t.Fatal(lacks)
	}
	if lacks != nil {
		t.Skipf("needs QEMU and the files of scripts/image/vm.sh: %v", lacks)
	}
	return dir
}

func makeSlot(t *testing.T) *network.Slot {
	t.Helper()
	ctx := context.Background()
	n, err := network.Open(ctx, network.Config{Name: slotName, Tap: true, Subnet: netip.MustParsePrefix(slotNet),
		Allow: []netip.Prefix{netip.MustParsePrefix(webNet)}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Destroy(ctx); err != nil {
			t.Error(err)
		}
	})
	s, err := n.Make(ctx)
	if err != nil {
		t.Fatal(err)
	}
	s.SetEgress(func(ctx context.Context) (net.Conn, error) { // accepted, and then nothing
		<-ctx.Done()
		return nil, ctx.Err()
	})
	return s
}

// makeWeb makes the web host and serves there.
func makeWeb(t *testing.T) {
	t.Helper()
	remove := fmt.Sprintf("ip netns del %s 2>/dev/null || true; ip link del %s 2>/dev/null || true", webNS, webLink)
	sh(t, remove)
	t.Cleanup(func() { sh(t, remove) })
	sh(t, fmt.Sprintf(`
ip netns add %[1]s
ip link add %[2]s type veth peer name eth0 netns %[1]s
ip addr add %[3]s/24 dev %[2]s
ip link set %[2]s up
ip -n %[1]s link set lo up
ip -n %[1]s addr add %[4]s/24 dev eth0
ip -n %[1]s addr add %[5]s/32 dev lo
ip -n %[1]s link set eth0 up
ip -n %[1]s route add default via %[3]s
ip route add %[5]s/32 via %[4]s`, webNS, webLink, webHost, webAddr, closed))
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	server := exec.Command("ip", "netns", "exec", webNS, self)
	server.Env = append(os.Environ(), dialsEnv+"=listen "+webPort)
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Process.Kill(); _ = server.Wait() })
}

func sh(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", command).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
}

// overlay makes the machine's disk: that of the image and room to write.
func overlay(t *testing.T, dir, files string, room int64) string {
	t.Helper()
	base := filepath.Join(files, "disk.ext4")
	info, err := os.Stat(base)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "disk.qcow2")
	sh(t, fmt.Sprintf("qemu-img create -q -f qcow2 -F raw -b %s %s %d", base, path, info.Size()+room+room/16)) // and ext4's own tables
	return path
}

// withAgent appends the archive with the agent, this very binary.
func withAgent(t *testing.T, dir, files string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	into := filepath.Join(dir, "initrd")
	sh(t, fmt.Sprintf(`cd %[1]s; mkdir root; cp %[2]s root/agent; printf '%%s\0' --kind shell '' >root/agent.args
cp %[3]s/initrd %[4]s; chmod +w %[4]s; cd root; printf 'agent\nagent.args\n' | cpio -o -H newc --quiet >>%[4]s`, dir, self, files, into))
	return into
}

// tscKHz is this processor's clock, which is also the emulated one's.
func tscKHz(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "cpu MHz\t\t: ")
	var mhz float64
	if _, err := fmt.Sscan(after, &mhz); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(int(mhz * 1000))
}

// greet connects to the agent as hostd does and gives what it says.
func greet(t *testing.T, slot *network.Slot, ended <-chan struct{}) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(bootWait); time.Now().Before(deadline); {
		cmd := exec.Command("nsenter", "--net="+slot.Info().NetNS, self)
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=hear %s:%d", dialsEnv, agentlink.GuestAddr, agentlink.AgentPort))
		if out, err := cmd.Output(); err == nil {
			return string(out)
		}
		select {
		case <-ended:
			return "nothing: the machine has ended"
		default:
		}
	}
	return "nothing"
}

// dialsEnv makes this binary a small network tool: "dial ADDR..." prints how
// each connection went, "hear ADDR" what is said there, "listen ADDR" serves.
const dialsEnv = "BERTH_GUEST_DIALS"

func dialAll() {
	what := strings.Fields(os.Getenv(dialsEnv))
	switch what[0] {
	case "listen":
		serve(what[1])
	case "hear":
		conn, err := net.DialTimeout("tcp4", what[1], time.Second)
		if err != nil {
			os.Exit(1)
		}
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.Copy(os.Stdout, conn); err != nil {
			os.Exit(1)
		}
	case "dial":
		results := map[string]string{}
		for _, addr := range what[1:] {
			results[addr] = dial(addr)
		}
		_ = json.NewEncoder(os.Stdout).Encode(results)
	}
}

func serve(addr string) {
	l, err := net.Listen("tcp4", addr)
	if err != nil {
		os.Exit(1)
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		conn.Close()
	}
}

func dial(addr string) string {
	conn, err := net.DialTimeout("tcp4", addr, 10*time.Second)
	switch {
	case err == nil:
		conn.Close()
		return "connected"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	}
	return err.Error()
}

// beAgent is process 1 of the machine: it looks around, answers hostd once,
// tells, and ends the machine.
func beAgent() {
	var got seen
	got.Args = os.Args[1:]
	got.Hostname, _ = os.Hostname()
	id, _ := os.ReadFile("/etc/machine-id")
	got.MachineID = strings.TrimSpace(string(id))
	mounts, _ := os.ReadFile("/proc/self/mounts")
	got.Mounts = strings.Split(strings.TrimSpace(string(mounts)), "\n")
	var stat syscall.Statfs_t
	_ = syscall.Statfs("/", &stat)
	got.DiskBytes, got.FreeBytes = stat.Blocks*uint64(stat.Bsize), stat.Bavail*uint64(stat.Bsize)
	got.Limits = map[string]uint64{}
	for name, resource := range map[string]int{"nproc": 6, "nofile": syscall.RLIMIT_NOFILE} {
		var l syscall.Rlimit
		_ = syscall.Getrlimit(resource, &l)
		got.Limits[name] = l.Max
	}
	go serve("127.0.0.1:8000")
	go serve(agentlink.GuestAddr + ":8000")
	got.Dials = map[string]string{}
	for _, group := range []uint32{0, agentlink.UserGID, agentlink.BrowserGID} {
		for addr, result := range dialAs(group) {
			got.Dials[fmt.Sprint(group, " ", addr)] = result
		}
	}
	answer()
	text, _ := json.Marshal(got)
	fmt.Printf("SEEN %s\n", text)
	os.Exit(0) // a panic of the kernel, and so QEMU's end
}

// answer takes one connection from the listener that stage0 passed.
func answer() {
	l, err := net.FileListener(os.NewFile(agentlink.ListenFD, "listener"))
	if err != nil {
		fmt.Println("listener:", err)
		return
	}
	if conn, err := l.Accept(); err == nil {
		_, _ = io.WriteString(conn, agentWord)
		conn.Close()
	}
}

// dialAs dials everything as a process of that group.
func dialAs(group uint32) map[string]string {
	cmd := exec.Command(agentPath)
	slot := func(port int) string { return fmt.Sprintf("%s:%d", agentlink.SlotAddr, port) }
	cmd.Env = []string{dialsEnv + "=dial " + strings.Join([]string{webAddr + webPort, closed + webPort,
		slot(agentlink.EgressPort), slot(agentlink.DNSPort), fmt.Sprintf("%s:%d", agentlink.GuestAddr, agentlink.AgentPort),
		agentlink.GuestAddr + ":8000", "127.0.0.1:8000"}, " ")}
	uid := uint32(agentlink.UserUID)
	if group == 0 {
		uid = 0
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: group}}
	out, err := cmd.Output()
	results := map[string]string{}
	if err := errors.Join(err, json.Unmarshal(out, &results)); err != nil {
		results["failed"] = err.Error()
	}
	return results
}
