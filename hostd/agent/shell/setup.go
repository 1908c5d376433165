package shell

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"
)

// maxTimeout is the longest a command may run, setup steps too.
const maxTimeout = time.Hour

// Step is how one setup command ended.
type Step struct {
	Index    int // from 1
	Command  string
	ExitCode *int // nil when its hour was over
}

// Hold keeps all commands but setup's waiting until release is called. Call it
// before clients can reach the shells, RunSetup then.
func (s *Shells) Hold() (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	gate := make(chan struct{})
	s.gate = gate
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.gate == gate {
			s.gate = nil
			close(gate)
		}
	}
}

// pass waits while setup runs.
func (s *Shells) pass(ctx context.Context) error {
	s.mu.Lock()
	gate := s.gate
	s.mu.Unlock()
	if gate == nil {
		return nil
	}
	select {
	case <-gate:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.ctx.Done():
		return errClosed
	}
}

// RunSetup runs the commands in order in the default shell while everybody
// else's wait, and tells each end to onStep. The first failure ends it; the
// error is a sentence for the client that names the step.
func (s *Shells) RunSetup(ctx context.Context, commands []string, onStep func(Step)) error {
	if err := s.busy(); err != nil {
		return err
	}
	defer s.tails.Done()
	s.mu.Lock()
	held := s.gate != nil
	s.mu.Unlock()
	if !held {
		defer s.Hold()()
	}
	for i, text := range commands {
		c := &Command{Text: text, Timeout: maxTimeout, Shell: Default}
		tail := &halves{limit: 2 << 10}
		out, err := s.exec(ctx, c, Sinks{Stdout: io.Discard, Stderr: tail})
		if err != nil {
			return fmt.Errorf("setup step %d (%s) could not run: %w", i+1, cut(text, 200), err)
		}
		if onStep != nil {
			onStep(Step{Index: i + 1, Command: cutEncoded(text, maxShown), ExitCode: out.ExitCode})
		}
		if err := stepError(i+1, text, out, tail.text()); err != nil {
			return err
		}
	}
	return nil
}

func stepError(index int, text string, out Outcome, stderr string) error {
	name := fmt.Sprintf("setup step %d (%s)", index, cut(text, 200))
	switch {
	case out.TimedOut:
		return fmt.Errorf("%s was stopped after %s", name, maxTimeout)
	case *out.ExitCode == 0:
		return nil
	}
	if stderr = lastLine(stderr); stderr != "" {
		return fmt.Errorf("%s failed with exit code %d: %s", name, *out.ExitCode, stderr)
	}
	return fmt.Errorf("%s failed with exit code %d", name, *out.ExitCode)
}

// lastLine is the last line of text that is not blank, cut to 500 bytes.
func lastLine(text string) string {
	text = strings.ToValidUTF8(strings.TrimSpace(text), "\uFFFD")
	return cut(text[strings.LastIndexByte(text, '\n')+1:], 500)
}
