package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/shared/api"
)

// guest is a session whose machine is known on the host.
type guest struct {
	api.Session
	group string // cgroup of its machine
}

// open makes a session with browser and shell and finds its machine.
func (b *bench) open(ctx context.Context) (*guest, func(), error) {
	s, err := b.stack.create(ctx, "both")
	if err != nil {
		return nil, nil, err
	}
	release := func() { _ = b.stack.release(context.WithoutCancel(ctx), s.Id) } // down ends it otherwise
	r, err := b.stack.api.Exec(ctx, s.Id, api.Exec{Command: "cat /etc/machine-id"})
	if err != nil {
		release()
		return nil, nil, err
	}
	group, err := b.stack.machineOf(strings.TrimSpace(r.Stdout))
	if err == nil {
		err = b.stack.full(ctx)
	}
	if err != nil {
		release()
		return nil, nil, err
	}
	return &guest{s, group}, release, nil
}

// evaluate: Runtime.evaluate through gateway, hostd and agent, beside a socket
// inside the slot's network namespace straight to the same Chromium.
func (b *bench) evaluate(ctx context.Context) error {
	g, release, err := b.open(ctx)
	if err != nil {
		return err
	}
	defer release()
	through, err := newCaller(ctx, *g.ConnectUrl, dialPlain)
	if err != nil {
		return fmt.Errorf("through the gateway: %w", err)
	}
	defer through.ws.close()
	straight, err := g.direct(ctx)
	if err != nil {
		return fmt.Errorf("straight: %w", err)
	}
	defer straight.ws.close()
	var far, near samples
	if err := interleave(ctx, 3, b.rounds(40, 15), through.evaluate(&far), straight.evaluate(&near)); err != nil {
		return err
	}
	b.add(figure{What: "evaluate round trip through gateway, p50", Beside: "the same Chromium directly", Unit: "µs",
		Value: far.median(), Peer: near.median(), Now: 1.5, Aim: 1.2, Count: len(far),
		Note: fmt.Sprintf("p95 %.0f beside %.0f µs; difference of the medians %.0f µs", far.quantile(0.95), near.quantile(0.95), far.median()-near.median())})
	return nil
}

// caller is a socket attached to a page.
type caller struct {
	ws   *socket
	page string
}

func newCaller(ctx context.Context, url string, dial dialer) (*caller, error) {
	ws, err := openSocket(ctx, url, dial)
	if err != nil {
		return nil, err
	}
	page, err := ws.attach()
	if err != nil {
		ws.close()
		return nil, err
	}
	return &caller{ws, page}, nil
}

// evaluate is one side of a row about round trips: a batch of calls, in µs.
func (c *caller) evaluate(into *samples) func(context.Context, bool) error {
	const batch = 200
	return func(_ context.Context, counts bool) error {
		for range batch {
			began := time.Now()
			if _, err := c.ws.call(c.page, "Runtime.evaluate", `{"expression":"1+1","returnByValue":true}`); err != nil {
				return err
			}
			if counts {
				*into = append(*into, float64(time.Since(began).Nanoseconds())/1000)
			}
		}
		return nil
	}
}

// direct connects to the session's Chrome where it listens.
func (g *guest) direct(ctx context.Context) (*caller, error) {
	pid, args, err := chromeOf(g.group)
	if err != nil {
		return nil, err
	}
	for _, a := range args {
		profile, ok := strings.CutPrefix(a, "--user-data-dir=")
		if !ok {
			continue
		}
		// Chrome writes port and path of its DevTools there.
		b, err := os.ReadFile(filepath.Join(fmt.Sprintf("/proc/%d/root", pid), profile, "DevToolsActivePort"))
		if err != nil {
			return nil, err
		}
		port, path, _ := strings.Cut(strings.TrimSpace(string(b)), "\n")
		return newCaller(ctx, "ws://127.0.0.1:"+port+path, dialIn(fmt.Sprintf("/proc/%d/ns/net", pid)))
	}
	return nil, errors.New("chrome has no profile")
}

// dialIn dials inside a network namespace.
func dialIn(ns string) dialer {
	return func(_ context.Context, _, address string) (conn net.Conn, err error) {
		addr, err := net.ResolveTCPAddr("tcp4", address)
		if err != nil {
			return nil, err
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			var f *os.File
			if f, err = os.Open(ns); err != nil {
				return
			}
			defer f.Close()
			if err = unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err == nil {
				conn, err = net.DialTCP("tcp4", nil, addr)
			}
		}()
		<-done
		return conn, err
	}
}

// exec: a command in the session's shell, beside runc exec in an equal container.
func (b *bench) exec(ctx context.Context) error {
	g, release, err := b.open(ctx)
	if err != nil {
		return err
	}
	defer release()
	equal, err := b.stack.twin(ctx, filepath.Base(g.group))
	if err != nil {
		return err
	}
	defer equal.close()
	var shell, fresh, runc samples
	berth := func(into *samples, in api.Exec) func(context.Context, bool) error {
		return func(ctx context.Context, counts bool) error {
			began := time.Now()
			r, err := b.stack.api.Exec(ctx, g.Id, in)
			if err == nil && (r.ExitCode == nil || *r.ExitCode != 0) {
				err = fmt.Errorf("true ended with %v", r.ExitCode)
			}
			if counts {
				into.since(began)
			}
			return err
		}
	}
	peer := func(ctx context.Context, counts bool) error {
		began := time.Now()
		err := equal.exec(ctx)
		if counts {
			runc.since(began)
		}
		return err
	}
	no := json.RawMessage("false")
	err = interleave(ctx, 3, b.rounds(60, 20), berth(&shell, api.Exec{Command: "true"}), peer,
		berth(&fresh, api.Exec{Command: "true", Shell: &no}))
	if err != nil {
		return err
	}
	b.add(figure{What: "exec `true`, p50", Beside: "`runc exec` of the same in an equal container", Unit: "ms",
		Value: shell.median(), Peer: runc.median(), Now: 1.0 / 5, Aim: 1.0 / 10, Count: len(shell),
		Note: fmt.Sprintf("p95 %.1f beside %.1f ms; with shell false, a fresh process, %.1f ms", shell.quantile(0.95), runc.quantile(0.95), fresh.median())})
	return nil
}

// fileSize is what the file row moves.
const fileSize = 100_000_000

// file: GET of a file of the workspace, beside nginx serving that very file.
func (b *bench) file(ctx context.Context) error {
	g, release, err := b.open(ctx)
	if err != nil {
		return err
	}
	defer release()
	r, err := b.stack.api.Exec(ctx, g.Id, api.Exec{Command: "head -c " + strconv.Itoa(fileSize) + " /dev/urandom > big.bin"})
	if err != nil || r.ExitCode == nil || *r.ExitCode != 0 {
		return fmt.Errorf("make the file: %v %+v", err, r)
	}
	pid := procs(g.group)[0]
	nginx, stop, err := b.nginx(fmt.Sprintf("/proc/%d/root/workspace", pid))
	if err != nil {
		return err
	}
	defer stop()
	var berth, peer samples
	side := func(url string, into *samples) func(context.Context, bool) error {
		return func(ctx context.Context, counts bool) error {
			rate, err := b.fetch(ctx, url)
			if counts {
				*into = append(*into, rate)
			}
			return err
		}
	}
	err = interleave(ctx, 2, b.rounds(15, 5),
		side(b.stack.url+"/v1/sessions/"+g.Id+"/files?path="+url.QueryEscape("big.bin"), &berth), side(nginx+"/big.bin", &peer))
	if err != nil {
		return err
	}
	b.add(figure{What: "100 MB file GET", Beside: "nginx serving the same file, sendfile on", Unit: "MB/s",
		Value: berth.median(), Peer: peer.median(), Now: 0.25, Aim: 0.5, More: true, Count: len(berth)})
	return nil
}

// fetch reads a URL and returns MB per second.
func (b *bench) fetch(ctx context.Context, url string) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	req.Header.Set("X-Api-Key", b.stack.key)
	began := time.Now()
	resp, err := b.stack.http.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	buf := make([]byte, 256<<10)
	var n int64
	for {
		m, err := resp.Body.Read(buf)
		n += int64(m)
		if err == io.EOF {
			break
		} else if err != nil {
			return 0, err
		}
	}
	if resp.StatusCode != http.StatusOK || n != fileSize {
		return 0, fmt.Errorf("get %s: %s, %d bytes", url, resp.Status, n)
	}
	return fileSize / 1e6 / time.Since(began).Seconds(), nil
}

// nginx serves a folder; stop ends it.
func (b *bench) nginx(root string) (base string, stop func(), err error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	addr := l.Addr().String()
	l.Close() // nginx takes it next; nobody else here asks for ports meanwhile
	dir, err := os.MkdirTemp(filepath.Dir(b.stack.home), "berth-bench-nginx.")
	if err != nil {
		return "", nil, err
	}
	conf := fmt.Sprintf("user root; daemon off; worker_processes auto; pid %[1]s/pid; error_log stderr;\n"+
		"events {}\nhttp { access_log off; sendfile on; tcp_nopush on; server { listen %[2]s; location / { root %[3]s; } } }\n", dir, addr, root)
	if err := os.WriteFile(filepath.Join(dir, "conf"), []byte(conf), 0o644); err != nil {
		return "", nil, err
	}
	cmd := exec.Command("nginx", "-p", dir, "-e", "stderr", "-c", filepath.Join(dir, "conf"))
	if err := cmd.Start(); err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	stop = func() {
		_ = cmd.Process.Signal(unix.SIGTERM) // ends its workers too
		_ = cmd.Wait()
		_ = os.RemoveAll(dir)
	}
	err = poll(context.Background(), 10*time.Second, "nginx listens", func() (bool, error) {
		conn, err := net.Dial("tcp4", addr)
		if err == nil {
			conn.Close()
		}
		return err == nil, err
	})
	if err != nil {
		stop()
		return "", nil, err
	}
	return "http://" + addr, stop, nil
}
