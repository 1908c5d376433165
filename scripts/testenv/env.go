// Package testenv starts the real product for tests: gateway, hostd and proxyd
// as separate, race-checked processes with a home, ports, networks and user
// ids of their own, so that several stacks run beside each other. At its end a
// stack must leave nothing on the host, and every HTTP answer that passes
// through its clients is held against openapi.yaml.
//
//	var stack = testenv.New(testenv.Options{})
//
//	func TestMain(m *testing.M) { os.Exit(stack.Main(m)) }
//	func TestX(t *testing.T)    { c := stack.Start(t).Client(t, "Scale"); ... }
package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// Options change a stack from what suits most tests.
type Options struct {
	Pool    string   // hostd's --pool; empty: browser=1,shell=1,both=1
	Gateway []string // more flags of gateway
	Hostd   []string // more flags of hostd
	Proxyd  []string // more flags of proxyd
	Hosts   int      // how many hostds; 0: one
	Proxyds int      // how many proxyds; 0: one
	Driver  string   // hostd's --driver; empty: oci. microvm runs without virtualisation of the processor (TCG).
}

// HostName is the i-th hostd's daemon name, from 0.
func HostName(i int) string {
	if i == 0 {
		return Hostd
	}
	return fmt.Sprintf("%s%d", Hostd, i+1)
}

// ProxydName is the i-th proxyd's daemon name, from 0.
func ProxydName(i int) string {
	if i == 0 {
		return Proxyd
	}
	return fmt.Sprintf("%s%d", Proxyd, i+1)
}

// startTime bounds the boot of a stack, its pool's first machines included.
const startTime = 120 * time.Second

// Env is a running stack. Safe for concurrent use.
type Env struct {
	BaseURL string // http://127.0.0.1:PORT
	Home    string

	parts   Parts
	num     number
	options Options
	daemons map[string]*process
	keys    atomic.Int64
	webs    atomic.Int64
}

// Start gives a test a stack of its own, which ends with the test.
func Start(t testing.TB, o Options) *Env {
	t.Helper()
	e, err := open(needParts(t), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Stop(); err != nil {
			t.Error(err)
		}
	})
	e.logsOf(t)
	return e
}

// Stack is a stack that the tests of a package share. It starts with the first
// test that asks for it.
type Stack struct {
	options Options

	mu  sync.Mutex // guards what follows
	env *Env
	err error
}

// New describes a shared stack.
func New(o Options) *Stack { return &Stack{options: o} }

// Main runs the tests and ends the stack; it returns the exit code.
func (s *Stack) Main(m *testing.M) int { return Main(m, s) }

// Main runs the tests of a package that shares several stacks, and ends those
// that were started; it returns the exit code.
func Main(m *testing.M, stacks ...*Stack) int {
	code := m.Run()
	for _, s := range stacks {
		if err := s.end(); err != nil {
			fmt.Fprintf(os.Stderr, "FAIL: the stack's end: %v\n", err)
			code = max(code, 1)
		}
	}
	return code
}

func (s *Stack) end() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.env == nil {
		return nil
	}
	return s.env.Stop()
}

// Start gives the shared stack. The daemons' log lines of a test that fails
// are shown with it.
func (s *Stack) Start(t testing.TB) *Env {
	t.Helper()
	parts := needParts(t)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.env == nil && s.err == nil {
		s.env, s.err = open(parts, s.options)
	}
	if s.err != nil {
		t.Fatal(s.err)
	}
	s.env.logsOf(t)
	return s.env
}

// logsOf shows what the daemons logged during t if t fails.
func (e *Env) logsOf(t testing.TB) {
	from := map[string]int64{}
	for name, p := range e.daemons {
		from[name] = p.logSize()
	}
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for name, p := range e.daemons {
			t.Logf("last lines of %s:\n%s", name, p.tail(from[name], 60))
		}
	})
}

func open(parts Parts, o Options) (*Env, error) {
	num, left, err := claimNumber()
	if err != nil {
		return nil, err
	}
	o.Hosts = max(1, o.Hosts)
	e := &Env{parts: parts, num: num, options: o, BaseURL: "http://" + num.port(0)}
	if left != "" {
		e.Home = left
		e.options.Hosts = maxHosts // whatever that one had
		e.describe(o)
		err := e.clean()
		e.options = o
		if err != nil {
			num.release()
			return nil, fmt.Errorf("what an earlier test left in %s: %w", left, err)
		}
	}
	if err := e.boot(o); err != nil {
		var logs strings.Builder
		for name, p := range e.daemons {
			fmt.Fprintf(&logs, "\nlast lines of %s:\n%s", name, p.tail(0, 30))
		}
		return nil, errors.Join(fmt.Errorf("start the stack: %w%s", err, &logs), e.Stop())
	}
	return e, nil
}

func (e *Env) boot(o Options) (err error) {
	// Short, since socket paths are bounded by 108 bytes (unix(7)).
	if e.Home, err = os.MkdirTemp("/tmp", "bt"); err != nil {
		return err
	}
	if err := errors.Join(e.num.note(e.Home), e.num.freePorts(ports)); err != nil {
		return err
	}
	e.describe(o)
	for _, name := range append(append([]string{Gateway}, e.proxyds()...), e.hosts()...) {
		if err := e.daemons[name].start(); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	return e.ready(ctx)
}

// describe fills in the daemons' command lines.
func (e *Env) describe(o Options) {
	if o.Pool == "" {
		o.Pool = "browser=1,shell=1,both=1"
	}
	n := e.num
	secret := []string{"--cluster-secret", filepath.Join(e.Home, "secret"), "--log-level", "debug"}
	e.daemons = map[string]*process{
		Gateway: {args: append([]string{"--name", "gw", "--home", filepath.Join(e.Home, Gateway), "--listen", n.port(0),
			"--raft-addr", n.port(1), "--gossip-addr", n.port(2)}, o.Gateway...)},
	}
	for i, name := range e.proxyds() {
		e.daemons[name] = &process{args: append([]string{"--name", fmt.Sprintf("p%d", i+1), "--home", filepath.Join(e.Home, name), "--listen", n.proxydPort(i, 0),
			"--gossip-addr", n.proxydPort(i, 1), "--control", n.proxydPort(i, 2), "--join", n.port(2), "--egress-allow", n.allowed()}, o.Proxyd...)}
	}
	for i, name := range e.hosts() {
		e.daemons[name] = &process{args: append(append([]string{"--name", fmt.Sprintf("h%d", i+1), "--listen", n.hostPort(i, 0), "--gossip-addr", n.hostPort(i, 1),
			"--join", n.port(2), "--pool", o.Pool}, e.hostFlags(i)...), o.Hostd...)}
	}
	for name, p := range e.daemons {
		p.name, p.binary, p.log = name, filepath.Join(e.parts.Bin, e.binaryOf(name)), filepath.Join(e.Home, name+".log")
		p.args = append(p.args, secret...)
	}
}

// hosts are the daemon names of the stack's hostds.
func (e *Env) hosts() []string {
	names := make([]string, max(1, e.options.Hosts))
	for i := range names {
		names[i] = HostName(i)
	}
	return names
}

// proxyds are the daemon names of the stack's proxyds.
func (e *Env) proxyds() []string {
	names := make([]string, max(1, e.options.Proxyds))
	for i := range names {
		names[i] = ProxydName(i)
	}
	return names
}

// Egress are the daemons that the connections of sessions pass through.
func (e *Env) Egress() []string { return append(e.hosts(), e.proxyds()...) }

func (e *Env) binaryOf(daemon string) string {
	switch {
	case strings.HasPrefix(daemon, Proxyd):
		return Proxyd
	case !strings.HasPrefix(daemon, Hostd):
		return daemon
	case e.options.Driver == Microvm:
		return Hostd + "-static"
	}
	return Hostd
}

// hostFlags are those that the i-th hostd and its cleanup share.
func (e *Env) hostFlags(i int) []string {
	home := filepath.Join(e.Home, HostName(i))
	flags := []string{"--home", home, "--image-base", e.parts.ImageBase,
		"--slot-prefix", e.num.prefix(i), "--subnet", e.num.subnet(i), "--uid-base", fmt.Sprint(e.num.uidBase(i)),
		"--egress-allow", e.num.allowed()}
	if e.options.Driver == Microvm {
		flags = append(flags, "--driver", Microvm, "--accel", "tcg", "--agent-layer", e.parts.VMAgent, "--vm-files", e.parts.VMFiles, "--template-cache", filepath.Join(home, "templates"))
	} else {
		flags = append(flags, "--driver", "oci", "--agent-layer", e.parts.AgentLayer)
	}
	return flags
}

// Microvm is the driver of machines with a kernel of their own.
const Microvm = "microvm"

// Stop ends the daemons and every machine, and fails if anything is left or a
// daemon's log shows a data race. Once only.
func (e *Env) Stop() error {
	defer e.num.release()
	errs := []error{e.agentRaces()}
	for _, name := range append(append([]string{Gateway}, e.hosts()...), e.proxyds()...) {
		p := e.daemons[name]
		if p == nil || p.cmd == nil {
			continue
		}
		if err, ended := p.exited(); ended {
			errs = append(errs, fmt.Errorf("%s had ended by itself: %v; its last lines:\n%s", name, err, p.tail(0, 20)))
		}
		errs = append(errs, p.end(syscall.SIGTERM, stopTime))
		if bad := p.races(); bad != "" {
			errs = append(errs, fmt.Errorf("%s's log has\n%s", name, bad))
		}
	}
	errs = append(errs, e.clean())
	return errors.Join(errs...)
}

// clean removes machines and home, and says what is left of them.
func (e *Env) clean() error {
	for i, name := range e.hosts() {
		if _, err := os.Stat(filepath.Join(e.Home, name)); err != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if _, err := output(ctx, filepath.Join(e.parts.Bin, Hostd), append([]string{"cleanup"}, e.hostFlags(i)...)...); err != nil {
			return err
		}
	}
	if left := e.leftovers(); len(left) > 0 {
		return fmt.Errorf("left behind by %s:\n  %s", e.Home, strings.Join(left, "\n  "))
	}
	return errors.Join(os.RemoveAll(e.Home), e.num.note(""))
}
