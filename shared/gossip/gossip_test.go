package gossip

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// A probe that is under way at a shutdown ends by its own deadline, later
	// than goleak waits.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode"))
}

var key = bytes.Repeat([]byte{1}, 32)

func join(t *testing.T, name, bind string, role Role, peers ...string) *Pool {
	t.Helper()
	p, err := Join(Config{Name: name, Bind: bind, Join: peers, Key: key, Meta: Meta{Role: role, Region: "local", Addr: "127.0.0.1:1"},
		Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(p) })
	return p
}

// kill stops a pool as kill -9 does: without a word to the others.
func kill(p *Pool) {
	p.stop()
	p.loops.Wait()
	_ = p.list.Shutdown()
}

// until waits for p to see what want says; late says how it was not so in time.
func until(p *Pool, within time.Duration, what string, want func([]Member) bool) (late string) {
	deadline := time.After(within)
	for {
		changed := p.Changed()
		members := p.Members("")
		if want(members) {
			return ""
		}
		select {
		case <-changed:
		case <-deadline:
			return fmt.Sprintf("%s: after %s %s sees %s", what, within, p.Name(), names(members))
		}
	}
}

// sees waits for something that may take as long as it likes.
func sees(t *testing.T, p *Pool, want string) {
	t.Helper()
	if late := until(p, time.Minute, "start", see(want)); late != "" {
		t.Fatal(late)
	}
}

// inTime plays something that has to be quick. A computer that is busy may be
// late now and then, but not every time.
func inTime(t *testing.T, play func(t *testing.T) (late string)) {
	t.Helper()
	const tries = 4
	for n := 1; ; n++ {
		var late string
		t.Run(fmt.Sprint("try ", n), func(t *testing.T) { late = play(t) })
		switch {
		case late == "" || t.Failed():
			return
		case n == tries:
			t.Fatal(late)
		}
		t.Log(late)
	}
}

func names(members []Member) string {
	var s []string
	for _, m := range members {
		s = append(s, m.Name)
	}
	return strings.Join(s, " ")
}

func see(want string) func([]Member) bool {
	return func(m []Member) bool { return names(m) == want }
}

func TestMembersFindEachOther(t *testing.T) {
	inTime(t, func(t *testing.T) string {
		gw := join(t, "gw", "127.0.0.1:0", Gateway)
		h1 := join(t, "h1", "127.0.0.1:0", Hostd, gw.Addr())
		h2 := join(t, "h2", "127.0.0.1:0", Hostd, gw.Addr())
		for _, p := range []*Pool{gw, h1, h2} {
			sees(t, p, "gw h1 h2")
		}
		if got := names(gw.Members(Hostd)); got != "h1 h2" {
			t.Errorf("hosts: %s", got)
		}
		if got := gw.Members(Gateway); len(got) != 1 || got[0].Gossip != gw.Addr() || got[0].Region != "local" {
			t.Errorf("itself: %+v", got)
		}
		if err := h2.Leave(time.Minute); err != nil {
			t.Error(err)
		}
		return until(gw, 5*time.Second, "a leave", see("gw h1"))
	})
}

func TestAHostThatStartsFirstFindsItsGatewayLater(t *testing.T) {
	inTime(t, func(t *testing.T) string {
		addr := freeAddr(t)
		h := join(t, "h", "127.0.0.1:0", Hostd, addr)
		sees(t, h, "h")
		gw := join(t, "gw", addr, Gateway)
		return cmp.Or(until(gw, 5*time.Second, "the gateway", see("gw h")), until(h, 5*time.Second, "the host", see("gw h")))
	})
}

// ownIP is an address of this computer that nobody else binds: a port there is
// not taken by another program between two uses.
const ownIP = "127.71.3.9:0"

// freeAddr is an address that nobody has now.
func freeAddr(t *testing.T) string {
	p := join(t, "probe", ownIP, Gateway)
	addr := p.Addr()
	kill(p)
	return addr
}

func TestAKilledMemberIsOutWithinFiveSeconds(t *testing.T) {
	inTime(t, func(t *testing.T) string {
		gw := join(t, "gw", "127.0.0.1:0", Gateway)
		h := join(t, "h", "127.0.0.1:0", Hostd, gw.Addr())
		other := join(t, "other", "127.0.0.1:0", Proxyd, gw.Addr())
		sees(t, gw, "gw h other")
		kill(h)
		return cmp.Or(until(gw, 5*time.Second, "kill", see("gw other")), until(other, 5*time.Second, "kill", see("gw other")))
	})
}

func TestAKilledGatewayThatComesBackIsFound(t *testing.T) {
	inTime(t, func(t *testing.T) string {
		gw := join(t, "gw", ownIP, Gateway)
		addr := gw.Addr()
		h := join(t, "h", "127.0.0.1:0", Hostd, addr)
		sees(t, h, "gw h")
		kill(gw)
		again := join(t, "gw", addr, Gateway) // knows nobody
		return cmp.Or(until(again, 2*time.Second, "after the restart", see("gw h")), until(h, 2*time.Second, "after the restart", see("gw h")))
	})
}

func TestARestartOnAnotherAddressReplacesAtOnce(t *testing.T) {
	inTime(t, func(t *testing.T) string {
		gw := join(t, "gw", "127.0.0.1:0", Gateway)
		h := join(t, "h", "127.0.0.1:0", Hostd, gw.Addr())
		sees(t, gw, "gw h")
		kill(h)
		again := join(t, "h", "127.0.0.1:0", Hostd, gw.Addr())
		// Well below the time in which the dead one would be missed.
		return until(gw, 1200*time.Millisecond, "the new address", func(m []Member) bool {
			return len(m) == 2 && m[1].Gossip == again.Addr()
		})
	})
}

func TestUpdatesArriveAndTheLastOneStays(t *testing.T) {
	inTime(t, func(t *testing.T) string {
		gw := join(t, "gw", "127.0.0.1:0", Gateway)
		h := join(t, "h", "127.0.0.1:0", Hostd, gw.Addr())
		sees(t, gw, "gw h")
		for i := range 1000 {
			if err := h.Update(func(m *Meta) { m.Free, m.Warm = i+1, map[string]int{"browser": i} }); err != nil {
				t.Fatal(err)
			}
		}
		if self := h.Self(); self.Free != 1000 {
			t.Errorf("itself it sees %d free", self.Free)
		}
		return until(gw, 5*time.Second, "updates", func(m []Member) bool {
			return len(m) == 2 && m[1].Free == 1000 && m[1].Warm["browser"] == 999
		})
	})
}

func TestAnUpdateThatDoesNotFitIsRefused(t *testing.T) {
	p := join(t, "h", "127.0.0.1:0", Hostd)
	changed := p.Changed()
	if err := p.Update(func(m *Meta) { m.CPUClass = strings.Repeat("x", MetaLimit) }); err == nil {
		t.Error("600 bytes were taken")
	}
	if err := p.Update(func(*Meta) {}); err != nil {
		t.Error(err)
	}
	select {
	case <-changed:
		t.Error("nothing changed, and yet")
	default:
	}
	if p.Self().CPUClass != "" {
		t.Error("the refused meta stayed")
	}
}

func TestReadersCannotWriteIntoThePool(t *testing.T) {
	p := join(t, "h", "127.0.0.1:0", Hostd)
	if err := p.Update(func(m *Meta) { m.Warm = map[string]int{"both": 1} }); err != nil {
		t.Fatal(err)
	}
	p.Members("")[0].Warm["both"] = 99
	if p.Self().Warm["both"] != 1 {
		t.Error("a reader changed the pool's own meta")
	}
}

func TestStrangersStayOut(t *testing.T) {
	gw := join(t, "gw", "127.0.0.1:0", Gateway)
	stranger, err := Join(Config{Name: "x", Bind: "127.0.0.1:0", Join: []string{gw.Addr()}, Key: bytes.Repeat([]byte{2}, 32),
		Meta: Meta{Role: Hostd, Addr: "127.0.0.1:1"}, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer kill(stranger)
	if n, err := stranger.list.Join([]string{gw.Addr()}); err == nil || n != 0 {
		t.Errorf("with another key it joined: %v", err)
	}
	if got := names(gw.Members("")); got != "gw" {
		t.Errorf("with another key: %s", got)
	}
}

func TestJoinRefuses(t *testing.T) {
	good := Meta{Role: Hostd, Addr: "127.0.0.1:1"}
	for name, c := range map[string]Config{
		"short key":    {Name: "h", Bind: "127.0.0.1:0", Key: key[:16], Meta: good},
		"no name":      {Bind: "127.0.0.1:0", Key: key, Meta: good},
		"slash":        {Name: "a/b", Bind: "127.0.0.1:0", Key: key, Meta: good},
		"no port":      {Name: "h", Bind: "127.0.0.1", Key: key, Meta: good},
		"named port":   {Name: "h", Bind: "127.0.0.1:http", Key: key, Meta: good},
		"no role":      {Name: "h", Bind: "127.0.0.1:0", Key: key, Meta: Meta{Addr: "127.0.0.1:1"}},
		"meta too big": {Name: "h", Bind: "127.0.0.1:0", Key: key, Meta: Meta{Role: Hostd, Addr: "127.0.0.1:1", CPUClass: strings.Repeat("x", 600)}},
	} {
		if p, err := Join(c); err == nil {
			kill(p)
			t.Errorf("%s: joined", name)
		}
	}
}

func TestOfSeveralLivesTheLatestCounts(t *testing.T) {
	now := time.Now()
	a, err := newLife("h", now)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := newLife("h", now.Add(time.Millisecond))
	if !b.after(a) || a.after(b) || a.after(a) {
		t.Error("order of lives")
	}
	twin, _ := newLife("h", now)
	if twin.after(a) == a.after(twin) {
		t.Error("two starts in one millisecond: neither or both are later")
	}
	if got, ok := parseLife(a.String()); !ok || got != a {
		t.Errorf("%v came back as %v", a, got)
	}
	for _, bad := range []string{"", "h", "h/1", "/1/x", "h/!/x", "h/1/x/y"} {
		if _, ok := parseLife(bad); ok {
			t.Errorf("%q is a life", bad)
		}
	}
}

func ExampleMeta() {
	wire, _ := Meta{Role: Hostd, Region: "local", Addr: "127.0.0.1:7103", Driver: "oci", Free: 8, Warm: map[string]int{"browser": 3, "both": 0}}.encode()
	fmt.Println(string(wire))
	// Output: {"v":1,"r":"hostd","g":"local","a":"127.0.0.1:7103","d":"oci","f":8,"w":{"browser":3}}
}
