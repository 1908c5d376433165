package shell

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/berth-dev/berth/hostd/agent/procfs"
)

// Saved is what a portable capture takes of a named shell.
type Saved struct {
	Name string   `json:"name"`
	Cwd  string   `json:"cwd"`
	Env  []string `json:"env,omitempty"` // exported, NAME=value; nil: as a new shell's
	// Proxied: Env is of a time when the shell was told of the session's proxy.
	Proxied bool `json:"proxied,omitempty"`
}

const (
	// maxEnv bounds one shell's environment, bytes: what execve(2) takes by default.
	maxEnv = 2 << 20
	// askLimit bounds what an idle bash needs to tell its environment.
	askLimit = 5 * time.Second
)

// ask makes bash tell its environment; it starts one program.
const ask = `/usr/bin/env -0`

// private are variables that bash makes anew, or that are ours.
var private = []string{markVar, "_", "SHLVL", "PWD"}

// Save describes every named shell. One that runs a command, or any when they
// stand still already, gives the environment of the program it runs, if it
// runs one. New commands must be kept away meanwhile (freeze.Freezer.Shut).
func (s *Shells) Save(ctx context.Context, still bool) []Saved {
	s.mu.Lock()
	lanes := make([]*lane, 0, len(s.lanes))
	for _, l := range s.lanes {
		lanes = append(lanes, l)
	}
	s.mu.Unlock()
	slices.SortFunc(lanes, func(a, b *lane) int { return strings.Compare(a.name, b.name) })
	var all []Saved
	for _, l := range lanes {
		if saved, ok := l.save(ctx, still); ok {
			all = append(all, saved)
		}
	}
	return all
}

func (l *lane) save(ctx context.Context, still bool) (Saved, bool) {
	l.mu.Lock()
	b, kept := l.bash, l.saved
	l.mu.Unlock()
	if kept != nil { // it has not run since it was restored
		return *kept, true
	}
	if b == nil || !b.alive() {
		return Saved{}, false
	}
	saved, pid := Saved{Name: l.name}, b.cmd.Process.Pid
	if !still && l.idle() {
		saved.Env = l.ask(ctx, b)
		<-l.turn
	} else {
		saved.Env = busyEnv(pid, still)
	}
	saved.Proxied = b.env.Load().proxy
	procfs.AsOwner(pid, func() { saved.Cwd, _ = os.Readlink(procfs.Path(pid, "cwd")) })
	return saved, saved.Cwd != ""
}

// idle takes the turn if nobody has it.
func (l *lane) idle() bool {
	select {
	case l.turn <- struct{}{}:
		return true
	default:
		return false
	}
}

// ask gets the environment from an idle bash. The caller has the turn.
func (l *lane) ask(ctx context.Context, b *bash) []string {
	status := b.status
	var out limited
	ctx, cancel := context.WithTimeout(ctx, askLimit) // the command's own clock stands still by now
	defer cancel()
	c := &Command{Text: ask, Timeout: maxTimeout, Shell: l.name, hidden: true}
	o, err := l.run(ctx, c, Sinks{Stdout: &out, Stderr: &limited{}})
	b.status = status // $? is the customer's
	if err != nil || o.ExitCode == nil || *o.ExitCode != 0 || out.full {
		l.s.log.Warn("a shell does not tell its environment", "shell", l.name, "err", err)
		return nil
	}
	return parseEnv(out.Bytes())
}

// limited keeps up to maxEnv bytes.
type limited struct {
	bytes.Buffer
	full bool
}

func (w *limited) Write(p []byte) (int, error) {
	if w.Len()+len(p) > maxEnv {
		w.full = true
		return len(p), nil
	}
	return w.Buffer.Write(p)
}

// busyWait is how long a busy bash has to be seen running a program: one that it
// has just forked shows bash's own environment until it executes.
const busyWait = 50 * time.Millisecond

func busyEnv(bash int, still bool) []string {
	for end := time.Now().Add(busyWait); ; time.Sleep(busyWait / 10) {
		if env := childEnv(bash); env != nil || still || time.Now().After(end) {
			return env
		}
	}
}

// childEnv is the environment that the newest program of a busy bash was
// started with: what bash exported at that moment.
func childEnv(bash int) []string {
	var newest process
	for _, p := range processes() {
		if p.ppid == bash && !p.dead && p.start >= newest.start {
			newest = p
		}
	}
	if newest.pid == 0 || strings.HasSuffix(newest.mark, "-0") { // a subshell shows what bash began with
		return nil
	}
	var raw []byte
	procfs.AsOwner(newest.pid, func() { raw, _ = os.ReadFile(procfs.Path(newest.pid, "environ")) })
	return parseEnv(raw)
}

func parseEnv(raw []byte) (env []string) {
	if len(raw) > maxEnv {
		return nil
	}
	for entry := range strings.SplitSeq(string(raw), "\x00") {
		name, _, ok := strings.Cut(entry, "=")
		if ok && name != "" && !slices.Contains(private, name) && !strings.HasPrefix(name, "__berth") && utf8.ValidString(entry) {
			env = append(env, entry)
		}
	}
	return env
}

// Check refuses what Save would not have given.
func Check(all []Saved) error {
	if len(all) > MaxShells {
		return fmt.Errorf("saved shells: %d of them", len(all))
	}
	names := map[string]bool{}
	for _, saved := range all {
		if !nameForm.MatchString(saved.Name) || names[saved.Name] {
			return fmt.Errorf("saved shells: a name %.100q", saved.Name)
		}
		names[saved.Name] = true
		size := 0
		for _, entry := range saved.Env {
			name, _, ok := strings.Cut(entry, "=")
			if size += len(entry) + 1; !ok || name == "" || strings.ContainsRune(entry, 0) || slices.Contains(private, name) || size > maxEnv {
				return fmt.Errorf("saved shells: %s has an entry %.100q", saved.Name, entry)
			}
		}
		if !filepath.IsAbs(saved.Cwd) || strings.ContainsRune(saved.Cwd, 0) {
			return fmt.Errorf("saved shells: %s is in %.100q", saved.Name, saved.Cwd)
		}
	}
	return nil
}

// Restore makes the shells begin as they were saved, when they are next used.
// Those that run are ended, with all they started.
func (s *Shells) Restore(all []Saved) error {
	if err := Check(all); err != nil {
		return err
	}
	if err := s.busy(); err != nil {
		return err
	}
	defer s.tails.Done()
	for i := range all {
		s.mu.Lock()
		l := s.lanes[all[i].Name]
		if l == nil {
			l = &lane{s: s, name: all[i].Name, turn: make(chan struct{}, 1)}
			s.lanes[l.name] = l
		}
		s.mu.Unlock()
		l.mu.Lock()
		l.saved = &all[i]
		l.mu.Unlock()
		l.end()
	}
	return nil
}

// apply makes cmd, a new bash, what was saved.
func (v *Saved) apply(cmd *exec.Cmd, mark string) {
	if v.Env != nil {
		cmd.Env = append(slices.Clone(v.Env), markVar+"="+mark)
	}
	cmd.Dir = v.Cwd
	cmd.Env = append(cmd.Env, "PWD="+v.Cwd)
}
