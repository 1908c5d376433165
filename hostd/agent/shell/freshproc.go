package shell

import (
	"context"
	"os"
	"os/exec"
)

// freshProcess is a bash that runs one command.
type freshProcess struct {
	cmd  *exec.Cmd
	out  [2]*os.File // read ends of stdout and stderr
	dead chan struct{}
	exit int // set before dead closes
}

// start starts the process; on error nothing of it is left open.
func (p *freshProcess) start(ctx context.Context, s *Shells) error {
	var w [2]*os.File
	for i := range w {
		var err error
		if p.out[i], w[i], err = os.Pipe(); err != nil {
			p.out[0].Close()
			w[0].Close()
			return err
		}
		defer w[i].Close()
	}
	p.cmd.Stdout, p.cmd.Stderr = w[0], w[1]
	if err := s.start(ctx, p.cmd); err != nil {
		p.out[0].Close()
		p.out[1].Close()
		return err
	}
	return nil
}

func (p *freshProcess) wait() {
	p.exit = exitCode(p.cmd.Wait(), p.cmd.ProcessState)
	close(p.dead)
}

func (p *freshProcess) await(ctx, shells context.Context) (code int, ended bool) {
	select {
	case <-p.dead:
		return p.exit, true
	case <-ctx.Done():
	case <-shells.Done():
	}
	return 0, false
}
