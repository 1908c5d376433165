package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/berth-dev/berth/shared/agentlink"
)

const egressPort = ":78" // agentlink.EgressPort

const echoPort = 4007

// Chrome's group reaches loopback and the egress listener. Whatever else it
// tries, by any protocol, no frame leaves the slot.
func TestBrowserGroupReachesOnlyItsListener(t *testing.T) {
	n := openNet(t, nil)
	newWeb(t, n, echoPort, 443, 3478)
	s := makeSlot(t, n)
	s.SetEgress(func(ctx context.Context) (net.Conn, error) { // an echo server in proxyd's place
		var d net.Dialer
		return d.DialContext(ctx, "tcp", net.JoinHostPort(webAddr, fmt.Sprint(echoPort)))
	})
	w := &web{t}
	w.echo(n, s.Info().NetNS, "0.0.0.0", 8000)
	w.echo(n, s.Info().NetNS, "127.0.0.1", 9053)
	frames := watch(t, s.Info().Name)
	self := n.addr(s.Info().Index).String()
	expect(t, s, agentlink.BrowserGID, map[string]string{
		"tcp=127.0.0.1:8000":                     "ok",
		"udp=127.0.0.1:9053":                     "ok",
		"tcp=" + agentlink.SlotAddr + egressPort: "ok",
		"tcp=" + agentlink.SlotAddr + ":53":      "no",
		"udp=" + agentlink.SlotAddr + ":53":      "no",
		"tcp=" + agentlink.SlotAddr + ":8000":    "no",
		"tcp=" + self + ":8000":                  "no",
		"tcp=" + webAddr + ":4007":               "no",
		"tcp=" + publicAddr + ":443":             "no",
		"udp=" + publicAddr + ":443":             "no", // QUIC
		"udp=" + webAddr + ":3478":               "no", // STUN
		"tcp@eth0=" + publicAddr + ":443":        "no",
		"udp@eth0=" + publicAddr + ":443":        "no",
		"udp@eth0=127.0.0.1:443":                 "no",
		"udp@lo=" + publicAddr + ":443":          "no",
		"ping=" + publicAddr:                     "no",
		"join=224.0.0.251:5353":                  "no",
		"tcp=[2606:4700::1111]:443":              "no",
		"udp=[2606:4700::1111]:443":              "no",
		"udp=[ff02::fb%eth0]:5353":               "no",
		"raw=":                                   "refused",
		"packet=":                                "refused",
	})
	// The mark is sent by the shell's group; all that came before is Chrome's.
	expect(t, s, agentlink.UserGID, map[string]string{"mark=" + webAddr + ":4007": "ok"})
	for _, f := range frames.until(t, "MARK-ON-THE-WIRE") {
		t.Errorf("a frame left the slot: %x", f)
	}
	var out string
	if err := n.inNamespace(s.Info().NetNS, func() error {
		out = run(t, "nft list counter inet slot browser_refused")
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(out, "packets 0 ") {
		t.Errorf("refusals were not counted: %s", out)
	}
}

func TestShellReachesPublicAddressesOnly(t *testing.T) {
	n := openNet(t, nil)
	w := newWeb(t, n, echoPort, 25, 465, 587, 2525)
	w.echo(n, filepath.Join(netnsDir, webNS), publicAddr, 4009)
	w.echo(n, "", hostAddr, 4008)
	s, other := makeSlot(t, n), makeSlot(t, n)
	otherAddr := n.addr(other.Info().Index).String()
	w.echo(n, other.Info().NetNS, "0.0.0.0", echoPort)
	w.echo(n, s.Info().NetNS, "0.0.0.0", 8000)
	hostEth := "192.0.2.2"
	want := map[string]string{
		"tcp=127.0.0.1:8000":                  "ok",
		"tcp=" + webAddr + ":4007":            "ok", // private, but opened
		"udp=" + webAddr + ":4007":            "ok",
		"ping=" + webAddr:                     "ok",
		"tcp=" + publicAddr + ":4007":         "ok",
		"udp=" + publicAddr + ":4009":         "ok",
		"ping=" + publicAddr:                  "ok",
		"tcp=" + privAddr + ":4007":           "no",
		"udp=" + privAddr + ":4007":           "no",
		"ping=" + privAddr:                    "no",
		"tcp=" + metaAddr + ":4007":           "no",
		"tcp=" + cgnatAddr + ":4007":          "no",
		"tcp=" + hostAddr + ":4008":           "no", // opened network, but the host itself
		"udp=" + hostAddr + ":4008":           "no",
		"ping=" + hostAddr:                    "no",
		"tcp=" + hostEth + ":4008":            "no",
		"tcp=" + otherAddr + ":4007":          "no",
		"udp=" + otherAddr + ":4007":          "no",
		"tcp=" + gatewayAddr.String() + ":22": "no",
		"tcp=" + webAddr + ":25":              "no",
		"tcp=" + webAddr + ":465":             "no",
		"tcp=" + webAddr + ":587":             "no",
		"tcp=" + webAddr + ":2525":            "no",
		"udp=" + webAddr + ":25":              "no",
		"tcp=[2606:4700::1111]:443":           "no",
		"udp=255.255.255.255:4007":            "no",
		"udp=224.0.0.251:5353":                "no",
		"raw=":                                "refused",
		"packet=":                             "refused",
	}
	expect(t, s, agentlink.UserGID, want)
	// Root inside the machine has no more rights over the slot.
	expect(t, s, 0, map[string]string{"tcp=" + webAddr + ":4007": "ok", "tcp=" + metaAddr + ":4007": "no", "tcp=" + webAddr + ":25": "no"})

	// The host's own layer holds without the slot's.
	if err := n.inNamespace(s.Info().NetNS, func() error { run(t, "nft flush ruleset"); return nil }); err != nil {
		t.Fatal(err)
	}
	delete(want, "raw=")
	delete(want, "packet=")
	delete(want, "udp=255.255.255.255:4007") // stays on the link in any case
	delete(want, "tcp="+gatewayAddr.String()+":22")
	expect(t, s, agentlink.UserGID, want)
}

func TestSlotsAreMadeAtOnceAndLeaveNothing(t *testing.T) {
	n := openNet(t, nil)
	const many = 8
	slots := make([]*Slot, many)
	var wg sync.WaitGroup
	for i := range many {
		wg.Go(func() {
			s, err := n.Make(context.Background())
			if err != nil {
				t.Error(err)
				return
			}
			slots[i] = s
		})
	}
	wg.Wait()
	seen := map[int]bool{}
	for _, s := range slots {
		if s == nil {
			t.FailNow()
		}
		if info := s.Info(); seen[info.Index] || info != n.info(info.Index) {
			t.Fatalf("slot %+v", info)
		}
		seen[s.Info().Index] = true
	}
	for _, s := range slots {
		wg.Go(func() {
			if err := errors.Join(s.Close(context.Background()), s.Close(context.Background())); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if left := leftovers(t, testName); len(left) != 1 { // the host's table stays for the next slot
		t.Errorf("left behind: %q", left)
	}
	if again := makeSlot(t, n); again.Info().Index != 0 {
		t.Errorf("index %d, want the lowest free one", again.Info().Index)
	}
}

func TestNoIndexLeft(t *testing.T) {
	n := openNet(t, func(c *Config) { c.Subnet = netip.MustParsePrefix("10.126.0.0/30") })
	makeSlot(t, n)
	makeSlot(t, n)
	if _, err := n.Make(context.Background()); !errors.Is(err, ErrFull) {
		t.Fatalf("got %v", err)
	}
}

// A failed Make leaves nothing of what it had made.
func TestMakeUndoesItself(t *testing.T) {
	n := openNet(t, nil)
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // nft cannot be run
	if _, err := n.Make(ctx); err == nil {
		t.Fatal("made a slot without rules")
	}
	if left := leftovers(t, testName); len(left) != 1 {
		t.Errorf("left behind: %q", left)
	}
}

// Slots outlive a hostd; the next one adopts some and sweeps the others.
func TestAdoptAndSweep(t *testing.T) {
	needRoot(t)
	first, err := Open(context.Background(), testConfig()) // what it leaves, n removes
	if err != nil {
		t.Fatal(err)
	}
	kept, lost := makeSlot(t, first), makeSlot(t, first)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	n := openNet(t, nil)
	newWeb(t, n, echoPort)
	if fresh := makeSlot(t, n); fresh.Info().Index != 2 {
		t.Fatalf("a new slot took index %d of one that exists", fresh.Info().Index)
	}
	s, err := n.Adopt(context.Background(), kept.Info())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Adopt(context.Background(), kept.Info()); err == nil {
		t.Error("adopted twice")
	}
	foreign := lost.Info()
	foreign.UIDBase++
	if _, err := n.Adopt(context.Background(), foreign); err == nil {
		t.Error("adopted a slot of another configuration")
	}
	if err := n.Sweep(context.Background(), func(index int) bool { return index == kept.Info().Index }); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Adopt(context.Background(), lost.Info()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("adopting a swept slot: %v", err)
	}
	s.SetEgress(func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", net.JoinHostPort(webAddr, fmt.Sprint(echoPort)))
	})
	expect(t, s, agentlink.BrowserGID, map[string]string{"tcp=" + agentlink.SlotAddr + egressPort: "ok", "tcp=" + webAddr + ":4007": "no"})
	expect(t, s, agentlink.UserGID, map[string]string{"tcp=" + webAddr + ":4007": "ok"})
}

func TestSweepTakesHalfMadeSlots(t *testing.T) {
	n := openNet(t, nil)
	path := filepath.Join(netnsDir, testName+"-5")
	if err := os.WriteFile(path, nil, 0o444); err != nil { // a crash between name and mount
		t.Fatal(err)
	}
	stranger := filepath.Join(netnsDir, testName+"-x5")
	if err := os.WriteFile(stranger, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := n.Sweep(context.Background(), func(int) bool { return false }); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: %v", path, err)
	}
	if err := os.Remove(stranger); err != nil {
		t.Errorf("a name that is no slot's was taken: %v", err)
	}
}

func BenchmarkMake(b *testing.B) {
	n := openNet(b, nil)
	for b.Loop() {
		s := makeSlot(b, n)
		b.StopTimer()
		if err := s.Close(context.Background()); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
