package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/shared/agentlink"
)

// A probe is this test binary run inside a slot as a process of the machine.
// It does, all at once, what its environment says, each "what=address", and
// prints the results. What a probe expects of a peer is an echo.
const probeEnv = "BERTH_NETWORK_PROBE"

const (
	probeWait = 3 * time.Second // for TCP: whatever takes longer hangs
	probeUDP  = 3 * time.Second // for the answer to a datagram
)

type probeResult struct {
	Op, Result string
	Ms         int64
}

func probeMain() {
	ops := strings.Split(os.Getenv(probeEnv), " ")
	out := make([]probeResult, len(ops))
	var wg sync.WaitGroup
	for i, op := range ops {
		wg.Go(func() {
			began := time.Now()
			result := "ok"
			if err := probe(op); err != nil {
				result = outcome(err)
			}
			out[i] = probeResult{op, result, time.Since(began).Milliseconds()}
		})
	}
	wg.Wait()
	_ = json.NewEncoder(os.Stdout).Encode(out)
}

func outcome(err error) string {
	var t net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		return "reset"
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EADDRNOTAVAIL):
		return "refused"
	case errors.As(err, &t) && t.Timeout():
		return "timeout"
	}
	return err.Error()
}

func probe(op string) error {
	kind, addr, _ := strings.Cut(op, "=")
	switch kind {
	case "tcp", "tcp@lo", "tcp@eth0":
		return probeTCP(addr, deviceOf(kind))
	case "udp", "udp@lo", "udp@eth0":
		return probeUDPEcho(addr, deviceOf(kind))
	case "mark": // one datagram, no answer wanted
		conn, err := net.Dial("udp", addr)
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.Write([]byte("MARK-ON-THE-WIRE"))
		return err
	case "ping":
		return probePing(addr)
	case "raw":
		_, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)
		return err
	case "packet":
		_, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
		return err
	case "join":
		return probeMulticast(addr)
	case "connect": // an HTTP proxy at SlotAddr, then an echo
		return probeConnect(addr)
	}
	return fmt.Errorf("unknown probe %q", op)
}

func deviceOf(kind string) func(string, string, syscall.RawConn) error {
	_, device, ok := strings.Cut(kind, "@")
	if !ok {
		return nil
	}
	return func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), device) })
		return errors.Join(cerr, err)
	}
}

func probeTCP(addr string, control func(string, string, syscall.RawConn) error) error {
	d := net.Dialer{Timeout: probeWait, Control: control}
	conn, err := d.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	return echoed(conn, probeWait)
}

func probeUDPEcho(addr string, control func(string, string, syscall.RawConn) error) error {
	d := net.Dialer{Control: control}
	conn, err := d.Dial("udp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	return echoed(conn, probeUDP)
}

func echoed(conn net.Conn, wait time.Duration) error {
	_ = conn.SetDeadline(time.Now().Add(wait))
	const word = "are you there?"
	if _, err := io.WriteString(conn, word); err != nil {
		return err
	}
	buf := make([]byte, len(word))
	if _, err := io.ReadFull(conn, buf); err != nil {
		return err
	}
	if string(buf) != word {
		return fmt.Errorf("answered %q", buf)
	}
	return nil
}

// probePing uses the unprivileged ICMP socket.
func probePing(addr string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	to := &unix.SockaddrInet4{Addr: [4]byte(net.ParseIP(addr).To4())}
	echo := []byte{8, 0, 0, 0, 0, 0, 0, 1, 'h', 'i'} // the kernel sets id and checksum
	if err := unix.Sendto(fd, echo, 0, to); err != nil {
		return err
	}
	tv := unix.NsecToTimeval(probeUDP.Nanoseconds())
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	_, _, err = unix.Recvfrom(fd, make([]byte, 64), 0)
	if err == unix.EAGAIN {
		return os.ErrDeadlineExceeded
	}
	return err
}

// probeMulticast joins a group on eth0, for which the kernel itself sends
// IGMP reports, and sends to it as mDNS does.
func probeMulticast(addr string) error {
	i, err := net.InterfaceByName("eth0")
	if err != nil {
		return err
	}
	group, err := net.ResolveUDPAddr("udp4", addr)
	if err != nil {
		return err
	}
	conn, err := net.ListenMulticastUDP("udp4", i, group)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.WriteTo([]byte("mdns"), group)
	return err
}

func probeConnect(addr string) error {
	conn, err := net.DialTimeout("tcp", net.JoinHostPort(agentlink.SlotAddr, fmt.Sprint(agentlink.EgressPort)), probeWait)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(probeWait))
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", addr, addr)
	head := make([]byte, 0, 512)
	for !strings.HasSuffix(string(head), "\r\n\r\n") {
		var b [1]byte
		if _, err := io.ReadFull(conn, b[:]); err != nil {
			return err
		}
		head = append(head, b[0])
	}
	if status, _, _ := strings.Cut(string(head), "\r\n"); !strings.Contains(status, " 200 ") {
		_, reason, _ := strings.Cut(string(head), "X-Service-Proxy-Error: ")
		reason, _, _ = strings.Cut(reason, "\r\n")
		return errors.New(reason)
	}
	return echoed(conn, probeWait)
}

// inSlot runs probes as a machine's user with the given group inside.
func inSlot(t testing.TB, s *Slot, gid uint32, ops ...string) map[string]probeResult {
	t.Helper()
	base := s.Info().UIDBase
	cmd := exec.Command(probeBinary)
	cmd.Env = append(os.Environ(), probeEnv+"="+strings.Join(ops, " "), "GORACE=atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{
		Uid: base + agentlink.UserUID, Gid: base + gid, Groups: []uint32{base + agentlink.UserGID}}}
	var out []byte
	err := s.net.inNamespace(s.Info().NetNS, func() (err error) {
		out, err = cmd.Output()
		return err
	})
	if err != nil {
		t.Fatalf("probe: %v", err)
	}
	var list []probeResult
	if err := json.Unmarshal(out, &list); err != nil {
		t.Fatalf("probe answered %q: %v", out, err)
	}
	results := map[string]probeResult{}
	for _, r := range list {
		results[r.Op] = r
	}
	return results
}

// expect runs probes and compares: "ok", or "no" for anything that is refused
// at once (datagrams may also just stay unanswered), or the very result.
func expect(t testing.TB, s *Slot, gid uint32, want map[string]string) {
	t.Helper()
	var ops []string
	for op := range want {
		ops = append(ops, op)
	}
	for op, got := range inSlot(t, s, gid, ops...) {
		switch {
		case want[op] == "no" && strings.HasPrefix(op, "tcp"):
			if got.Result != "reset" && got.Result != "refused" || got.Ms > 1500 {
				t.Errorf("gid %d, %s: %s after %d ms, want a refusal at once", gid, op, got.Result, got.Ms)
			}
		case want[op] == "no":
			if got.Result == "ok" {
				t.Errorf("gid %d, %s: it got through", gid, op)
			}
		case got.Result != want[op]:
			t.Errorf("gid %d, %s: %s, want %s", gid, op, got.Result, want[op])
		}
	}
}
