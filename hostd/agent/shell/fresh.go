package shell

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/agent/freeze"
)

// maxArg is how long one argument of a program may be, MAX_ARG_STRLEN of
// execve(2), less the final NUL.
const maxArg = 128<<10 - 1

// fromFile runs a command that is too long for an argument.
const fromFile = `IFS= \builtin read -r -d '' -u 3 __berth; exec 3<&-; \builtin eval "$__berth"`

// execFresh runs c in a bash of its own that keeps nothing.
func (s *Shells) execFresh(ctx context.Context, c *Command, to Sinks) (Outcome, error) {
	ctx, cancel := s.cfg.Freezer.WithTimeout(ctx, freeze.Customer, c.Timeout, errTimeout)
	defer cancel()
	mark := newMark()
	p, err := s.startFresh(ctx, c, mark)
	if err != nil {
		return Outcome{}, fmt.Errorf("fresh process: %w", err)
	}
	began := time.Now()
	begin(to)
	taps := [2]*tap{openTap(p.out[0], to.Stdout), openTap(p.out[1], to.Stderr)}
	code, ended := p.await(ctx, s.ctx)
	if !ended {
		killTree(p.cmd.Process, mark)
		<-p.dead
	}
	for _, t := range taps {
		t.finish(s)
	}
	return outcome(ctx, s.ctx, code, ended, began)
}

// startFresh starts the process; its exit code is set when dead closes.
func (s *Shells) startFresh(ctx context.Context, c *Command, mark string) (*freshProcess, error) {
	env := make(map[string]string)
	for _, m := range []map[string]string{s.sessionEnv().all(), c.Env} {
		for k, v := range m {
			env[k] = v
		}
	}
	args := []string{"--noprofile", "--norc", "-c", c.Text}
	var text *os.File
	if len(c.Text) > maxArg {
		var err error
		if text, err = memoryFile(c.Text); err != nil {
			return nil, err
		}
		defer text.Close()
		args[len(args)-1] = fromFile
	}
	cmd := s.command(args, env, mark+"-0")
	if text != nil {
		cmd.ExtraFiles = []*os.File{text}
	}
	if c.Cwd != "" {
		cmd.Dir = c.Cwd
		cmd.Env = append(cmd.Env, "PWD="+c.Cwd)
	}
	p := &freshProcess{cmd: cmd, dead: make(chan struct{})}
	if err := p.start(ctx, s); err != nil {
		return nil, err
	}
	s.tails.Go(p.wait)
	return p, nil
}

// memoryFile holds text and a NUL, to be read from its start.
func memoryFile(text string) (*os.File, error) {
	fd, err := unix.MemfdCreate("command", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), "command")
	_, err = f.WriteString(text + "\x00")
	if _, seekErr := f.Seek(0, 0); err != nil || seekErr != nil {
		f.Close()
		return nil, errors.Join(err, seekErr)
	}
	return f, nil
}
