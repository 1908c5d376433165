package proxies

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/trust"
)

// whole is the real proxyd, the real record and what follows the one into the
// other; behind proxyd there is a proxy that serves echoes.
type whole struct {
	t       *testing.T
	dir     string
	secret  *trust.Secret
	link    string
	control string
	echo    string
	cmd     *exec.Cmd
	book    *book
	proxies *Proxies
	rates   accounts.Rates

	carried map[egress.Type]*atomic.Int64 // what clients saw, both ways
	meant   atomic.Int64                  // what they were to carry through proxies
}

func newWhole(t *testing.T) *whole {
	w := &whole{t: t, dir: t.TempDir(), link: free(t), control: free(t), echo: startEcho(t), book: record(t),
		carried: map[egress.Type]*atomic.Int64{egress.Residential: {}, egress.Datacenter: {}, egress.Custom: {}, egress.None: {}}}
	residential, datacenter := session.Nanos(4_300_000_001), session.Nanos(700_000_003)
	w.rates = accounts.Rates{Sizes: session.DefaultSizes, Prices: accounts.DefaultPrices()}
	w.rates.Prices.ResidentialPerGB, w.rates.Prices.DatacenterPerGB = &residential, &datacenter
	var err error
	if w.secret, err = trust.LoadOrCreate(filepath.Join(w.dir, "secret")); err != nil {
		t.Fatal(err)
	}
	providers := fmt.Sprintf(`{"providers":[{"name":"one","types":["residential","datacenter"],"server":"http://%s","username":"u[-session-{session}]","password":"x"}]}`, w.echo)
	if err := os.WriteFile(filepath.Join(w.dir, "providers.json"), []byte(providers), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("go", "build", "-o", filepath.Join(w.dir, "proxyd"), "github.com/berth-dev/berth/proxyd").CombinedOutput(); err != nil {
		t.Fatalf("build proxyd: %v: %s", err, out)
	}
	w.start()
	t.Cleanup(func() { _ = w.cmd.Process.Kill(); _ = w.cmd.Wait() })
	d := &proxyd{addr: w.control}
	w.proxies = runAs(t, w.secret, newTown(member("p1", d)), w.book)
	return w
}

func (w *whole) start() {
	w.cmd = exec.Command(filepath.Join(w.dir, "proxyd"), "--home", w.dir, "--listen", w.link, "--control", w.control, "--gossip-addr", free(w.t), "--join", free(w.t),
		"--cluster-secret", filepath.Join(w.dir, "secret"), "--egress-allow", "127.0.0.1/32", "--name", "p1", "--providers", filepath.Join(w.dir, "providers.json"),
		"--drain", "5s", "--log-level", "warn")
	w.cmd.Stderr = os.Stderr
	if err := w.cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	until(w.t, "proxyd", func() bool {
		c, err := net.Dial("tcp", w.link)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

func (w *whole) stop(sig syscall.Signal) {
	if err := w.cmd.Process.Signal(sig); err != nil {
		w.t.Fatal(err)
	}
	_ = w.cmd.Wait()
	until(w.t, "the news of its end", func() bool { return !w.proxies.Any() })
}

// createSessions puts running sessions into the record.
func (w *whole) createSessions(n int) {
	ctx := w.t.Context()
	_, err := w.book.PutKey(ctx, placement.Project{ID: "p", Plan: "Hobby"}, placement.Key{Hash: "h"})
	if err != nil {
		w.t.Fatal(err)
	}
	now := time.Now().UTC().Truncate(time.Millisecond)
	for i := range n {
		s := session.Session{ID: name(i), ProjectID: "p", Kind: session.Browser, Status: session.Running, Timeout: 900, CreatedAt: now, StartedAt: now, RunningSince: now, Epoch: 1}
		if _, _, err := w.book.CreateSession(ctx, s, ""); err != nil {
			w.t.Fatal(err)
		}
	}
}

// report is the project's, with all that was counted.
func (w *whole) report() (accounts.Usage, error) {
	err := w.proxies.Refresh(w.t.Context())
	now := time.Now()
	return accounts.Report(w.book.View(), "p", accounts.Window{From: now.AddDate(0, -1, 0), To: accounts.Forever}, now, w.rates), err
}

// carry sends n bytes through one connection of a session and takes them back.
func (w *whole) carry(id string, version uint64, typ egress.Type, n int64) error {
	if typ.Proxied() {
		w.meant.Add(2 * n)
	}
	p := proxylink.Pass{SessionID: id, ProjectID: "p", Epoch: 1, Version: version, Expires: time.Now().Add(time.Hour)}
	if typ != egress.None {
		rule := egress.Rule{Type: typ, IP: egress.Rotating}
		if typ == egress.Custom {
			rule.Server = "http://" + w.echo
		}
		p.Routes = []proxylink.Route{{Rule: rule}}
	}
	sealed, err := proxylink.SealPass(w.secret, p)
	if err != nil {
		return err
	}
	c, err := proxylink.Dial(context.Background(), w.link, proxylink.Hello{Proof: w.secret.Proof(), SessionID: id, Epoch: 1, Pass: sealed})
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	target := "site.example:443"
	if typ == egress.None {
		target = w.echo // straight out: the echo itself takes a CONNECT then
	}
	r, err := connect(c, target)
	if err != nil {
		return err
	}
	if typ == egress.None {
		if r, err = connect(c, target); err != nil {
			return err
		}
	}
	sent := make(chan error, 1)
	go func() {
		_, err := io.CopyN(c, rand.Reader, n)
		sent <- errors.Join(err, c.CloseWrite())
	}()
	back, err := io.Copy(io.Discard, r)
	if err = errors.Join(err, <-sent); err == nil && back != n {
		err = fmt.Errorf("%d of %d bytes came back", back, n)
	}
	w.carried[typ].Add(back + n)
	return err
}

func connect(c net.Conn, target string) (*bufio.Reader, error) {
	fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target)
	r := bufio.NewReader(c)
	resp, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	if err == nil && resp.StatusCode != 200 {
		err = fmt.Errorf("CONNECT: %s, %s", resp.Status, resp.Header.Get(egress.ReasonHeader))
	}
	return r, err
}

// sums gives the report of this moment, which must be the sum of the sessions.
func (w *whole) sums() (accounts.Usage, error) {
	now, view := time.Now(), w.book.View()
	u := accounts.Report(view, "p", accounts.Window{From: now.AddDate(0, -1, 0), To: accounts.Forever}, now, w.rates)
	var cost session.Nanos
	for s := range view.SessionsSince("p", time.Time{}) {
		cost += w.rates.Session(view, *s, now)
	}
	if cost != u.CostUSD {
		return u, fmt.Errorf("sessions cost %s, the report says %s", cost, u.CostUSD)
	}
	return u, nil
}

// always looks at the sums again and again, whatever goes on, until what it gives
// is called: they agree at any moment, and nothing that was counted goes again.
func (w *whole) always() (stop func()) {
	over, done := make(chan struct{}), make(chan struct{})
	steps, last := 0, int64(0)
	go func() {
		defer close(done)
		for {
			u, err := w.sums()
			now := int64(u.Proxy.Residential + u.Proxy.Datacenter + u.Proxy.Custom)
			if err != nil || now < last {
				w.t.Errorf("in between: %d bytes of proxy data after %d: %v", now, last, err)
				return
			}
			if now > last {
				steps, last = steps+1, now
			}
			select {
			case <-over:
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	}()
	return func() {
		close(over)
		if <-done; steps < 3 {
			w.t.Errorf("in between the report changed %d times only", steps)
		}
	}
}

// check holds the report against the sessions, the clients and the ledger.
func (w *whole) check(when string) {
	w.t.Helper()
	var u accounts.Usage
	want := func(t egress.Type) accounts.Gigabytes { return accounts.Gigabytes(w.carried[t].Load()) }
	right := func() bool {
		if err := w.proxies.Refresh(w.t.Context()); err != nil {
			return false
		}
		var err error
		if u, err = w.sums(); err != nil {
			w.t.Fatalf("%s: %v", when, err)
		}
		return u.Proxy.Residential == want(egress.Residential) && u.Proxy.Datacenter == want(egress.Datacenter) && u.Proxy.Custom == want(egress.Custom)
	}
	for deadline := time.Now().Add(20 * time.Second); !right(); time.Sleep(20 * time.Millisecond) { // a relay counts when its write is done: just after the client read
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: the report has %s, %s, %s GB; clients carried %s, %s, %s", when, u.Proxy.Residential, u.Proxy.Datacenter, u.Proxy.Custom,
				want(egress.Residential), want(egress.Datacenter), want(egress.Custom))
		}
	}
}

// counters adds up what proxyd says of its sessions.
func (w *whole) counters(sessions int) (sum int64) {
	for i := range sessions {
		req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("http://%s/v1/counters?sessionId=%s", w.control, name(i)), nil)
		if err != nil {
			w.t.Fatal(err)
		}
		req.Header.Set(trust.Header, w.secret.Proof())
		req.Close = true
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			w.t.Fatal(err)
		}
		var c struct{ Up, Down int64 }
		err = json.NewDecoder(resp.Body).Decode(&c)
		resp.Body.Close()
		if err != nil {
			w.t.Fatal(err)
		}
		sum += c.Up + c.Down
	}
	return sum
}

func name(i int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", i) }

// load runs connections of all sessions at once, whose settings change on the
// way.
func (w *whole) load(round, sessions int) {
	var all sync.WaitGroup
	types := []egress.Type{egress.Residential, egress.Datacenter, egress.Custom, egress.None}
	for i := range sessions {
		all.Go(func() {
			for j := range 12 {
				version := uint64(round*100 + j/3) // a PATCH after every third
				if err := w.carry(name(i), version, types[(i+j/3)%len(types)], mrand.Int64N(200_000)); err != nil {
					w.t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

// TestUsageIsWhatClientsCarried: under load, changes of settings, restarts and
// kills of proxyd, the report is the sum of the sessions and has every byte.
func TestUsageIsWhatClientsCarried(t *testing.T) {
	w := newWhole(t)
	const sessions = 6
	w.createSessions(sessions)
	until(t, "the stream", w.proxies.Any)
	defer w.always()()

	w.load(1, sessions)
	w.check("after load")
	all := int64(0)
	for _, n := range w.carried {
		all += n.Load()
	}
	if w.carried[egress.None].Load() == 0 {
		t.Fatal("nothing went straight out")
	}
	// Straight out, the second CONNECT and its answer are payload too.
	if got := w.counters(sessions); got < all {
		t.Errorf("proxyd's counters have %d bytes, clients carried %d", got, all)
	}

	w.stop(syscall.SIGTERM)
	w.start()
	until(t, "the stream of the next run", w.proxies.Any)
	w.check("after a restart")
	w.load(2, sessions)
	w.check("after load of the next run")

	w.stop(syscall.SIGKILL)
	w.check("after a kill") // all had been told: nothing may be missing
	w.start()
	until(t, "the stream of the last run", w.proxies.Any)
	w.load(3, sessions)
	w.check("after load of the last run")
	if err := errors.Join(w.book.EndAll(t.Context(), sessions)...); err != nil {
		t.Fatal(err)
	}
	w.check("after the sessions' ends")
}

// TestAKillTakesWhatNobodyHeardOf: killed in full work, proxyd loses at most
// what it had neither flushed nor told, and nothing is counted twice.
func TestAKillTakesWhatNobodyHeardOf(t *testing.T) {
	w := newWhole(t)
	const sessions = 4
	w.createSessions(sessions)
	until(t, "the stream", w.proxies.Any)
	total := func() int64 {
		u, _ := w.report()
		return int64(u.Proxy.Residential + u.Proxy.Datacenter + u.Proxy.Custom)
	}
	for round := range 3 {
		before, stop := total(), make(chan struct{})
		var all sync.WaitGroup
		for i := range sessions {
			all.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						_ = w.carry(name(i), uint64(round+1), egress.Residential, 100_000) // the kill breaks some
					}
				}
			})
		}
		heard := before
		until(t, "load", func() bool { heard = total(); return heard > before+1_000_000 })
		w.stop(syscall.SIGKILL)
		close(stop)
		all.Wait()
		w.start()
		until(t, "the next run", w.proxies.Any)
		if got := total(); got < heard || got > w.meant.Load() {
			t.Fatalf("round %d: %d bytes after the kill, %d were heard of before it and %d meant to go", round, got, heard, w.meant.Load())
		}
	}
}

// EndAll ends the sessions.
func (b *book) EndAll(ctx context.Context, n int) (errs []error) {
	for i := range n {
		_, _, err := b.EndSession(ctx, name(i), 0, time.Now(), session.Released, "")
		errs = append(errs, err)
	}
	return errs
}

// startEcho is a proxy that takes every CONNECT and gives back what comes.
func startEcho(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	t.Cleanup(func() { ln.Close(); all.Wait() })
	all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(time.Minute))
				r := bufio.NewReader(c)
				if _, err := http.ReadRequest(r); err != nil {
					return
				}
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
				_, _ = io.Copy(c, r)
			})
		}
	})
	return ln.Addr().String()
}

func free(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}
