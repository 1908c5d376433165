package main

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

// runsProxyd makes the test binary a proxyd.
const runsProxyd = "BERTH_TEST_RUNS_PROXYD"

// daemonRig is a proxyd in a process of its own, which can be killed.
type daemonRig struct {
	t       *testing.T
	secret  *trust.Secret
	listen  string
	control *proxylink.Client
	args    []string
	cmd     *exec.Cmd
	log     *os.File
}

func startDaemon(t *testing.T) *daemonRig {
	t.Helper()
	dir := t.TempDir()
	secret, err := trust.LoadOrCreate(filepath.Join(dir, "secret"))
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	listen, control := free(t), free(t)
	r := &daemonRig{t: t, secret: secret, listen: listen, control: proxylink.NewClient(control, secret), log: log,
		args: []string{"--home", dir, "--name", "p", "--listen", listen, "--control", control, "--gossip-addr", free(t), "--join", free(t),
			"--cluster-secret", filepath.Join(dir, "secret"), "--egress-allow", "127.0.0.1", "--log-level", "warn", "--drain", "1s"}}
	r.start()
	t.Cleanup(func() {
		r.end(syscall.SIGKILL)
		r.control.Close()
		b, _ := os.ReadFile(log.Name())
		if strings.Contains(string(b), "DATA RACE") || t.Failed() {
			t.Errorf("proxyd's log: %s", b)
		}
		log.Close()
	})
	return r
}

func (r *daemonRig) start() {
	r.t.Helper()
	r.cmd = exec.Command(os.Args[0], r.args...)
	r.cmd.Env = append(os.Environ(), runsProxyd+"=1")
	r.cmd.Stdout, r.cmd.Stderr = r.log, r.log
	if err := r.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	until(r.t, func() bool {
		conn, err := net.Dial("tcp", r.listen)
		if err == nil {
			conn.Close()
			_, err = r.control.Ledger(r.t.Context())
		}
		return err == nil
	})
}

func (r *daemonRig) end(sig syscall.Signal) {
	_ = r.cmd.Process.Signal(sig) // it may have ended
	_ = r.cmd.Wait()
}

// bytesBySession are what two ends count.
type bytesBySession map[string][2]int64 // up, down

// ledger sums the rows that are not in one that was before.
func (r *daemonRig) ledger(without map[string]bool) (sums bytesBySession, incarnations map[string]bool) {
	r.t.Helper()
	l, err := r.control.Ledger(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	sums, incarnations = bytesBySession{}, map[string]bool{}
	for _, row := range l.Rows {
		incarnations[row.Incarnation] = true
		if !without[row.Incarnation] {
			was := sums[row.SessionID]
			sums[row.SessionID] = [2]int64{was[0] + row.Up, was[1] + row.Down}
		}
	}
	return sums, incarnations
}

// agrees waits until the ledger has what the kernel counted.
func (r *daemonRig) agrees(when string, kernel bytesBySession, without map[string]bool) {
	r.t.Helper()
	var sums bytesBySession
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if sums, _ = r.ledger(without); maps.Equal(sums, kernel) {
			return
		}
	}
	r.t.Fatalf("%s: the ledger has\n%v, the kernel\n%v", when, sums, kernel)
}

// Ten thousand connections of every kind, orderly and not, with a proxyd that is
// killed in between: its ledger is what the kernel says that the upstream side's
// sockets carried, less the heads that proxyd and the proxy said to each other.
func TestLedgerIsTheKernelsToTheByte(t *testing.T) {
	r := startDaemon(t)
	f := startFar(t)
	run := func(from, to int, killAt int) {
		var next, done atomic.Int64
		next.Store(int64(from))
		var workers sync.WaitGroup
		for range 40 {
			workers.Go(func() {
				for i := int(next.Add(1)) - 1; i < to; i = int(next.Add(1)) - 1 {
					err := f.connect(t.Context(), r, i)
					if err != nil && killAt == 0 {
						t.Errorf("connection %d (%s): %v", i, f.plan(i).kind, err)
					}
					if n := done.Add(1); int(n) == killAt {
						_ = r.cmd.Process.Kill()
					}
				}
			})
		}
		workers.Wait()
		f.settle()
	}
	run(0, 4000, 0)
	if !f.allPlanned(0, 4000) {
		t.Fatal("not all connections ended as they should have")
	}
	orderly := f.sums()
	r.agrees("at first", orderly, nil)

	run(4000, 6000, 1000)
	_ = r.cmd.Wait()
	r.start()
	kept, old := r.ledger(nil)
	for session, has := range kept {
		least, most := orderly[session], f.most(session)
		if has[0] < least[0] || has[1] < least[1] || has[0] > most[0] || has[1] > most[1] {
			t.Errorf("after kill -9 %s has %v, want %v to %v", session, has, least, most)
		}
	}
	if len(kept) != sessions {
		t.Errorf("after kill -9 the ledger has %d sessions", len(kept))
	}

	f.forget()
	run(6000, 10_000, 0)
	if !f.allPlanned(6000, 10_000) {
		t.Error("not all connections ended as they should have after the restart")
	}
	r.agrees("after kill -9", f.sums(), old)
	r.end(syscall.SIGTERM)
	r.start()
	r.agrees("after a stop", f.sums(), old)
}

// sessions of the connections.
const sessions = 8

// connect opens a session's connection by plan i and follows it.
func (f *far) connect(ctx context.Context, r *daemonRig, i int) error {
	p := f.plan(i)
	session := "s" + strconv.Itoa(i%sessions)
	pass, err := f.pass(r.secret, session)
	if err != nil {
		return err
	}
	conn, err := proxylink.Dial(ctx, r.listen, proxylink.Hello{Proof: r.secret.Proof(), Host: "h", SessionID: session, Epoch: 1, Pass: pass})
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(40 * time.Second))
	c := &near{conn: conn, plan: p}
	return c.run()
}

// pass leads a session through the far proxy.
func (f *far) pass(secret *trust.Secret, session string) ([]byte, error) {
	return proxylink.SealPass(secret, proxylink.Pass{SessionID: session, ProjectID: "p", Epoch: 1, Version: 1, Expires: time.Now().Add(time.Hour),
		Routes: []proxylink.Route{{Rule: egress.Rule{Type: egress.Custom, Server: fmt.Sprintf("http://%s", f.addr), Username: "u"}, Password: "p"}}})
}
