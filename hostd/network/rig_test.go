package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// The rig: slots of a network called "bnt", and a web host, a namespace behind
// a link of its own, with an address in an opened network, one in a private
// network that is not opened, a metadata address and a public address. All of
// them are really there and answer, so what does not get through was refused.
const (
	testName   = "bnt"
	testSubnet = "10.126.0.0/24"
	opened     = "10.226.0.0/24"
	hostAddr   = "10.226.0.1" // the host itself, inside the opened network
	webAddr    = "10.226.0.2"
	privAddr   = "10.227.0.2"
	metaAddr   = "169.254.169.254"
	cgnatAddr  = "100.64.9.9"
	publicAddr = "25.91.17.3"
	webNS      = "bweb"
	webLink    = "bweb0"
)

var probeBinary string // this test binary where every user may run it

func TestMain(m *testing.M) {
	if os.Getenv(probeEnv) != "" {
		probeMain()
		return
	}
	code := 1
	if err := errors.Join(alone(), copyProbe()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(code)
	}
	defer func() { os.RemoveAll(filepath.Dir(probeBinary)); os.Exit(code) }()
	if code = m.Run(); code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
}

// alone waits until no other run of these tests is on this host: slots have
// names and addresses that are the host's. So has an abstract socket, and it goes
// with its process.
func alone() error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	for end := time.Now().Add(5 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		err := unix.Bind(fd, &unix.SockaddrUnix{Name: "@" + testName + "-tests"}) // fd is never closed
		if err != unix.EADDRINUSE || time.Now().After(end) {
			return err
		}
	}
}

func copyProbe() error {
	dir, err := os.MkdirTemp("", "bnt-probe-")
	if err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	b, err := os.ReadFile(self)
	if err != nil {
		return err
	}
	probeBinary = filepath.Join(dir, "probe")
	return os.WriteFile(probeBinary, b, 0o755)
}

// needRoot skips on a developer's laptop and fails in CI.
func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("this test makes network namespaces and needs root")
	}
	t.Skip("needs root: makes network namespaces")
}

func testConfig() Config {
	return Config{Name: testName, Subnet: netip.MustParsePrefix(testSubnet), Allow: []netip.Prefix{netip.MustParsePrefix(opened)}}
}

// openNet opens a network that is gone without a trace after the test.
func openNet(t testing.TB, change func(*Config)) *Network {
	t.Helper()
	needRoot(t)
	cfg := testConfig()
	if change != nil {
		change(&cfg)
	}
	n, err := Open(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Destroy(context.Background()); err != nil {
			t.Error(err)
		}
		if left := leftovers(t, cfg.Name); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	})
	return n
}

func makeSlot(t testing.TB, n *Network) *Slot {
	t.Helper()
	s, err := n.Make(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// leftovers lists what of a network is still on the host.
func leftovers(t testing.TB, name string) []string {
	t.Helper()
	var out []string
	for _, glob := range []string{netnsDir + "/" + name + "-*", "/sys/class/net/" + name + "-*"} {
		found, err := filepath.Glob(glob)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, found...)
	}
	tables, err := exec.Command("nft", "list", "tables").CombinedOutput()
	if err != nil {
		t.Fatalf("nft list tables: %v: %s", err, tables)
	}
	for line := range strings.Lines(string(tables)) {
		if strings.TrimSpace(line) == "table inet "+name {
			out = append(out, line)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), netnsDir+"/"+name+"-") {
		out = append(out, "a mount")
	}
	return out
}

func run(t testing.TB, command string) string {
	t.Helper()
	out, err := exec.Command("sh", "-ec", command).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
	return string(out)
}

// web is the web host with echo servers on TCP and UDP at every port asked for.
type web struct{ t testing.TB }

func newWeb(t testing.TB, n *Network, ports ...int) *web {
	t.Helper()
	remove := fmt.Sprintf("ip netns del %s 2>/dev/null || true; ip link del %s 2>/dev/null || true", webNS, webLink)
	run(t, remove)
	t.Cleanup(func() { run(t, remove) })
	run(t, fmt.Sprintf(`
ip netns add %[1]s
ip link add %[2]s type veth peer name eth0 netns %[1]s
ip addr add %[3]s/24 dev %[2]s
ip link set %[2]s up
ip -n %[1]s link set lo up
ip -n %[1]s addr add %[4]s/24 dev eth0
ip -n %[1]s link set eth0 up
ip -n %[1]s route add default via %[3]s`, webNS, webLink, hostAddr, webAddr))
	for _, addr := range []string{privAddr, metaAddr, cgnatAddr, publicAddr} {
		run(t, fmt.Sprintf("ip -n %s addr add %s/32 dev lo; ip route add %s/32 via %s", webNS, addr, addr, webAddr))
	}
	w := &web{t}
	for _, port := range ports {
		w.echo(n, filepath.Join(netnsDir, webNS), "0.0.0.0", port)
	}
	return w
}

// echo serves TCP and UDP echo in a namespace ("" is the host's).
func (w *web) echo(n *Network, ns, addr string, port int) {
	w.t.Helper()
	var tcp net.Listener
	var udp net.PacketConn
	listen := func() (err error) {
		where := net.JoinHostPort(addr, fmt.Sprint(port))
		if tcp, err = net.Listen("tcp4", where); err != nil {
			return err
		}
		udp, err = net.ListenPacket("udp4", where)
		return err
	}
	err := error(nil)
	if ns == "" {
		err = listen()
	} else {
		err = n.inNamespace(ns, listen)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { tcp.Close(); udp.Close() })
	go func() {
		buf := make([]byte, 1<<16)
		for {
			size, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo(buf[:size], from)
		}
	}()
	go echoTCP(tcp)
}

func echoTCP(ln net.Listener) {
	for {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
			_, _ = io.Copy(conn, conn)
		}()
	}
}

// wire records every frame on a link of the host, both directions.
type wire struct {
	fd     int
	frames chan []byte
	done   chan struct{}
}

func watch(t testing.TB, link string) *wire {
	t.Helper()
	i, err := net.InterfaceByName(link)
	if err != nil {
		t.Fatal(err)
	}
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8                   // network byte order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0) // hears nothing before it has its link
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: i.Index}); err != nil {
		t.Fatal(err)
	}
	tv := unix.Timeval{Usec: 50_000}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		t.Fatal(err)
	}
	w := &wire{fd: fd, frames: make(chan []byte, 4096), done: make(chan struct{})}
	stop := make(chan struct{})
	go func() {
		defer close(w.done)
		buf := make([]byte, 1<<16)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if size, _, err := unix.Recvfrom(fd, buf, 0); err == nil {
				w.frames <- append([]byte(nil), buf[:size]...)
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-w.done; unix.Close(fd) })
	return w
}

// until collects frames up to the first that contains mark.
func (w *wire) until(t testing.TB, mark string) [][]byte {
	t.Helper()
	var out [][]byte
	deadline := time.After(30 * time.Second)
	for {
		select {
		case f := <-w.frames:
			if strings.Contains(string(f), mark) {
				return out
			}
			out = append(out, f)
		case <-deadline:
			t.Fatalf("the mark %q never crossed the wire; %d other frames did", mark, len(out))
		}
	}
}
