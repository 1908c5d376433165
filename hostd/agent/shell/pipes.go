package shell

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/berth-dev/berth/hostd/agent/account"
)

// pipes are a command's stdout and stderr: named pipes of its own, since bash
// can open a path but not be handed a descriptor, and since jobs left behind
// by one command must not write into the next one's answer.
type pipes struct {
	path [2]string
	r    [2]*os.File
	w    [2]*os.File // held until the command ended, so that readers do not see an end before its start
}

// pipes makes those of command id.
func (b *bash) pipes(id uint64, who account.Account) (*pipes, error) {
	b.files.Lock()
	defer b.files.Unlock()
	return openPipes(b.dir, id, who)
}

func openPipes(dir string, id uint64, who account.Account) (_ *pipes, err error) {
	p := new(pipes)
	defer func() {
		if err != nil {
			p.abandon()
		}
	}()
	for i, name := range [2]string{"o", "e"} {
		p.path[i] = filepath.Join(dir, fmt.Sprintf("%s%d", name, id))
		if err := makeFIFO(p.path[i], who); err != nil {
			return nil, err
		}
		if p.r[i], err = os.OpenFile(p.path[i], os.O_RDONLY|syscall.O_NONBLOCK, 0); err != nil {
			return nil, err
		}
		if p.w[i], err = os.OpenFile(p.path[i], os.O_WRONLY|syscall.O_NONBLOCK, 0); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// release lets the agent's own write ends go.
func (p *pipes) release() {
	for _, w := range p.w {
		w.Close()
	}
}

// remove takes the names away; who has a pipe open keeps it.
func (p *pipes) remove() {
	for _, path := range p.path {
		os.Remove(path)
	}
}

func (p *pipes) abandon() {
	for i := range p.path {
		p.r[i].Close() // a nil *os.File only returns an error
		p.w[i].Close()
	}
	p.remove()
}
