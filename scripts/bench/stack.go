package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/client"
)

// stack is a private Berth, run by scripts/daemons.sh in the environment that
// run.sh made.
type stack struct {
	home  string
	base  int   // BERTH_PORT_BASE
	setup setup // it runs with, zero while it is down
	api   *client.Client
	url   string
	key   string
	http  *http.Client
}

func newStack() (*stack, error) {
	s := &stack{home: os.Getenv("BERTH_HOME"), url: "http://" + os.Getenv("BERTH_LISTEN")}
	base, err := strconv.Atoi(os.Getenv("BERTH_PORT_BASE"))
	if err != nil || s.home == "" || os.Getenv("BERTH_BENCH") == "" {
		return nil, errors.New("this is started by scripts/bench/run.sh")
	}
	s.base = base
	return s, nil
}

// setup is what a stack runs with.
type setup struct {
	pool   string // BERTH_POOL, of each host
	driver string
	hosts  int
}

// containers is a host that runs machines by the oci driver.
func containers(pool string) setup { return setup{pool, "oci", 1} }

// microVMs is two hosts whose machines can move with their memory. Instructions
// are emulated, so that it is the same on every computer.
func microVMs(pool string) setup { return setup{pool, "microvm", 2} }

// environment is setup as daemons.sh and the daemons read it.
func (u setup) environment() error {
	return errors.Join(os.Setenv("BERTH_POOL", u.pool), os.Setenv("DRIVER", u.driver), os.Setenv("ACCEL", "tcg"),
		os.Setenv("HOSTS", strconv.Itoa(u.hosts)),
		os.Setenv("BERTH_CREATE_DEADLINE", map[string]string{"oci": "30s", "microvm": "15m"}[u.driver])) // a template is built by the first create
}

// hostds names the stack's hostds as daemons.sh does.
func (s *stack) hostds() []string { return []string{"hostd", "hostd2"}[:s.setup.hosts] }

// want starts the stack with a setup, anew when it ran with another one.
func (s *stack) want(ctx context.Context, u setup) error {
	if s.setup == u {
		return nil
	}
	if err := s.down(); err != nil {
		return err
	}
	if err := u.environment(); err != nil {
		return err
	}
	s.setup = u
	if err := s.up(ctx); err != nil {
		return err
	}
	key, err := os.ReadFile(filepath.Join(s.home, "dev.key"))
	if err != nil {
		return err
	}
	s.key = strings.TrimSpace(string(key))
	s.http = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 32, DisableCompression: true}}
	s.api = client.New(s.url, s.key, s.http)
	return s.full(ctx)
}

// up starts the daemons that do not run.
func (s *stack) up(ctx context.Context) error {
	out, err := exec.CommandContext(ctx, "scripts/daemons.sh", "up").CombinedOutput()
	if err != nil {
		return fmt.Errorf("daemons.sh up: %w: %s", err, out)
	}
	return nil
}

func (s *stack) down() error {
	if s.setup == (setup{}) {
		return nil
	}
	s.setup = setup{}
	if s.http != nil {
		s.http.CloseIdleConnections()
	}
	out, err := exec.Command("scripts/daemons.sh", "down").CombinedOutput()
	if err != nil {
		return fmt.Errorf("daemons.sh down: %w: %s", err, out)
	}
	return nil
}

// full waits until the pool has all its machines and nothing ends or boots, so
// that what is measured next has the computer for itself.
func (s *stack) full(ctx context.Context) error {
	want := 0
	for item := range strings.SplitSeq(s.setup.pool, ",") {
		_, n, _ := strings.Cut(item, "=")
		count, _ := strconv.Atoi(n) // the pools are constants here
		want += count * s.setup.hosts
	}
	return poll(ctx, 3*time.Minute, "the pool is full", func() (bool, error) {
		ready, err := s.ready(ctx)
		return ready == want, err
	})
}

// quiet is full, and no machine but the pool's is there any more.
func (s *stack) quiet(ctx context.Context) error {
	if err := s.full(ctx); err != nil {
		return err
	}
	return poll(ctx, time.Minute, "ended machines are gone", func() (bool, error) {
		ready, err := s.ready(ctx)
		return len(s.machines()) == ready, err
	})
}

// ready counts the pools' waiting machines.
func (s *stack) ready(ctx context.Context) (int, error) {
	n, err := s.metric(ctx, "berth_pool_ready{")
	return int(n), err
}

// metric adds up the series of all hosts whose lines begin with a prefix.
func (s *stack) metric(ctx context.Context, prefix string) (total float64, err error) {
	for i := range s.setup.hosts {
		text, err := fetchText(ctx, fmt.Sprintf("http://127.0.0.1:%d/metrics", s.base+101+10*i)) // as daemons.sh says
		if err != nil {
			return 0, err
		}
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, prefix) {
				v, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(line, ' ')+1:]), 64)
				if err != nil {
					return 0, fmt.Errorf("metric %q: %w", line, err)
				}
				total += v
			}
		}
	}
	return total, nil
}

func fetchText(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	_, err = b.ReadFrom(resp.Body)
	return b.String(), err
}

// group is the cgroup (version 2) above all machines, as hostd's oci driver
// names it by its home.
func (s *stack) group() string {
	sum := sha256.Sum256([]byte(filepath.Join(s.home, "hostd", "machines")))
	return filepath.Join(unified(), "berth", fmt.Sprintf("%x", sum[:4]))
}

// machines lists the machines' cgroups.
func (s *stack) machines() []string {
	dirs, _ := filepath.Glob(s.group() + "/*/cgroup.procs")
	for i := range dirs {
		dirs[i] = filepath.Dir(dirs[i])
	}
	return dirs
}

// machineOf finds the cgroup of the machine with a machine-id. Its name is the
// machine's id.
func (s *stack) machineOf(machineID string) (group string, err error) {
	for _, dir := range s.machines() {
		for _, pid := range procs(dir) {
			id, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/etc/machine-id", pid))
			if err == nil && strings.TrimSpace(string(id)) == machineID {
				return dir, nil
			}
		}
	}
	return "", fmt.Errorf("no machine has the id %s", machineID)
}

var kinds = map[string]api.CreateSession{
	"browser": {Browser: client.P(true)},
	"shell":   {Browser: client.P(false), Shell: client.P(true)},
	"both":    {Browser: client.P(true), Shell: client.P(true)},
}

// create makes a session that outlives its clients.
func (s *stack) create(ctx context.Context, kind string) (api.Session, error) {
	in := kinds[kind]
	in.KeepAlive = client.P(true)
	return s.api.CreateSession(ctx, in, "")
}

func (s *stack) release(ctx context.Context, id string) error {
	_, err := s.api.Release(ctx, id)
	return err
}

// pid gives a daemon's process.
func (s *stack) pid(daemon string) (int, error) {
	b, err := os.ReadFile(filepath.Join(s.home, "run", daemon+".pid"))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(b)) // boot, process id, start time
	if len(fields) < 2 {
		return 0, fmt.Errorf("%s.pid says %q", daemon, b)
	}
	return strconv.Atoi(fields[1])
}

// kill ends a daemon without warning.
func (s *stack) kill(daemon string) error {
	pid, err := s.pid(daemon)
	if err != nil {
		return err
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		return err
	}
	return poll(context.Background(), 10*time.Second, daemon+" is dead", func() (bool, error) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || bytes.Contains(stat, []byte(") Z ")), nil
	})
}

// cpu is the processor time in seconds that machines and daemons have used,
// runc and the rest of what hostd starts included.
func (s *stack) cpu() (float64, error) {
	total, err := groupCPU(s.group())
	if err != nil {
		return 0, err
	}
	for _, daemon := range []string{"gateway", "hostd", "proxyd"} {
		pid, err := s.pid(daemon)
		if err != nil {
			return 0, err
		}
		used, err := processCPU(pid)
		if err != nil {
			return 0, err
		}
		total += used
	}
	return total, nil
}

func dialPlain(ctx context.Context, network, address string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, network, address)
}

// poll asks until done says true.
func poll(ctx context.Context, within time.Duration, what string, done func() (bool, error)) error {
	for deadline := time.Now().Add(within); ; {
		ok, err := done()
		if ok {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("after %s still not: %s: %w", within, what, errors.Join(err, context.DeadlineExceeded))
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
