package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/client"
)

// crash: sessions in batches; while a batch is being made one of the daemons is
// killed with -9 and started again. Each acknowledged session must be adopted,
// answer, and be released; at the end nothing of any machine may be left.
func (b *bench) crash(ctx context.Context) error {
	const batch = 10
	total := b.rounds(300, 30)
	victims := []string{"hostd", "gateway", "proxyd"}
	var lost, made, refused int
	began := time.Now()
	for i := 0; made < total; i++ {
		ids, failed, err := b.crashBatch(ctx, victims[i%len(victims)], batch)
		if err != nil {
			return err
		}
		made += len(ids)
		refused += failed
		gone, err := b.useAndRelease(ctx, ids)
		if err != nil {
			return err
		}
		lost += gone
		if i > 3*total/batch {
			return fmt.Errorf("only %d sessions of %d after %d batches", made, total, i)
		}
	}
	took := time.Since(began)
	prefix := b.stack.prefix()
	if _, err := b.stack.api.ReleaseAll(ctx); err != nil { // those whose answer the killed gateway did not give
		return err
	}
	if err := b.stack.quiet(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "   ", err)
		lost++
	}
	if err := b.stack.down(); err != nil {
		return err
	}
	left := b.stack.leftovers(prefix)
	for _, what := range left {
		fmt.Fprintln(os.Stderr, "    left:", what)
	}
	b.add(figure{What: fmt.Sprintf("%d sessions, a daemon killed with -9 in each batch of %d: left, or not adopted", made, batch), Unit: "left",
		Value: float64(len(left) + lost), Now: 0, Aim: 0, Count: made,
		Note: fmt.Sprintf("%d creates refused while a daemon was away; %d sessions lost; %.0f s", refused, lost, took.Seconds())})
	return nil
}

// crashBatch creates sessions, and kills a daemon when half of them are there.
func (b *bench) crashBatch(ctx context.Context, victim string, n int) (ids []string, failed int, err error) {
	type made struct {
		session api.Session
		err     error
	}
	results := make(chan made, n)
	for i := range n {
		kind := "shell"
		if i == 0 {
			kind = "browser"
		}
		go func() {
			s, err := b.stack.create(ctx, kind)
			results <- made{s, err}
		}()
	}
	for i := range n {
		if i == n/2 {
			if err := errors.Join(b.stack.kill(victim), b.stack.up(ctx)); err != nil {
				return nil, 0, fmt.Errorf("kill %s: %w", victim, err)
			}
		}
		m := <-results
		if m.err != nil {
			failed++
			continue
		}
		ids = append(ids, m.session.Id)
	}
	return ids, failed, nil
}

// useAndRelease does something in each session and releases it; it counts the
// ones that do not answer.
func (b *bench) useAndRelease(ctx context.Context, ids []string) (lost int, err error) {
	for _, id := range ids {
		var last error
		err := poll(ctx, 20*time.Second, "session "+id+" answers", func() (bool, error) {
			last = b.use(ctx, id)
			return last == nil, last
		})
		if err != nil {
			fmt.Fprintln(os.Stderr, "    lost:", err)
			lost++
			continue
		}
		if err := b.stack.release(ctx, id); err != nil {
			return lost, err
		}
	}
	return lost, nil
}

func (b *bench) use(ctx context.Context, id string) error {
	s, err := b.stack.api.Session(ctx, id)
	if err != nil {
		return err
	}
	if s.Shell {
		r, err := b.stack.api.Exec(ctx, id, api.Exec{Command: "true", TimeoutMs: client.P(5000)})
		if err == nil && (r.ExitCode == nil || *r.ExitCode != 0) {
			err = fmt.Errorf("true: %+v", r)
		}
		return err
	}
	ws, err := openSocket(ctx, *s.ConnectUrl, dialPlain)
	if err != nil {
		return err
	}
	defer ws.close()
	return ws.version()
}

// prefix is how the names of this stack's slots begin, seen while it runs.
func (s *stack) prefix() string {
	pid, err := s.pid("hostd")
	if err != nil {
		return ""
	}
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	_, rest, _ := strings.Cut(string(b), "--slot-prefix\x00")
	prefix, _, _ := strings.Cut(rest, "\x00")
	return prefix
}

// leftovers lists what a stack that is down has left of its machines.
func (s *stack) leftovers(prefix string) []string {
	var left []string
	machines := filepath.Join(s.home, "hostd", "machines")
	for _, glob := range []string{machines + "/[0-9a-f]*", s.group() + "/*/cgroup.procs",
		"/run/netns/" + prefix + "-*", "/sys/class/net/" + prefix + "-*"} {
		found, _ := filepath.Glob(glob)
		left = append(left, found...)
	}
	for _, pid := range procs(s.group()) {
		left = append(left, fmt.Sprintf("process %d", pid))
	}
	dirs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range dirs {
		b, _ := os.ReadFile(path)
		if strings.Contains(string(b), s.home+"/") && path != fmt.Sprintf("/proc/%d/cmdline", os.Getpid()) {
			left = append(left, "process "+strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	table, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(table)) {
		if strings.Contains(line, s.home+"/") || strings.Contains(line, "/netns/"+prefix+"-") {
			left = append(left, "mount "+strings.TrimSpace(line))
		}
	}
	backings, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, path := range backings {
		if b, _ := os.ReadFile(path); strings.Contains(string(b), s.home+"/") {
			left = append(left, "loop device "+path)
		}
	}
	return left
}
