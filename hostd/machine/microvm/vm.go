package microvm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/cgroup"
)

// cleanupTime bounds the removal of a machine, which goes on when the context
// of who asked for it has ended.
const cleanupTime = 15 * time.Second

// vm is one running machine.
type vm struct {
	driver   *Driver
	handle   machine.Handle
	process  *cgroup.Process
	template *template

	mu    sync.Mutex // held through every change of state
	state state      // guarded by mu
	qmp   *monitor   // guarded by mu; nil: to be opened

	frozen atomic.Bool // as the state says, for those who must not wait until a change is through

	done     chan struct{} // closed by watch
	watched  chan struct{} // closed when watch has returned
	detached func() error
	stop     sync.Once
	stopped  chan struct{} // closed when stopErr is set
	stopErr  error         // written before stopped is closed
}

var _ machine.Kept = (*vm)(nil)

// newVM makes a started process this Driver's machine.
func newVM(d *Driver, h machine.Handle, p *cgroup.Process, t *template, s state, q *monitor) *vm {
	m := &vm{driver: d, handle: h, process: p, template: t, state: s, qmp: q,
		done: make(chan struct{}), watched: make(chan struct{}), stopped: make(chan struct{})}
	m.frozen.Store(s.Frozen)
	m.detached = sync.OnceValue(m.letGo)
	d.mu.Lock()
	d.live[h.Spec.ID] = m
	d.mu.Unlock()
	go m.watch()
	return m
}

// ID is the machine's.
func (m *vm) ID() string { return m.handle.Spec.ID }

// Handle re-adopts the machine.
func (m *vm) Handle() machine.Handle { return m.handle }

// Done is closed when QEMU has exited.
func (m *vm) Done() <-chan struct{} { return m.done }

func (m *vm) group() string { return m.driver.group(m.ID()) }
func (m *vm) dir() string   { return m.driver.dir(m.ID()) }

// watch closes done when QEMU exits.
func (m *vm) watch() {
	defer close(m.watched)
	if m.process.Wait() {
		m.process.Reap()
		close(m.done)
	}
}

// detach ends what this Driver value keeps of the machine, not the machine.
func (m *vm) detach() error { return m.detached() }

func (m *vm) letGo() error {
	err := m.process.Close()
	<-m.watched
	m.mu.Lock()
	defer m.mu.Unlock()
	return errors.Join(err, m.closeMonitor())
}

func (m *vm) closeMonitor() error {
	if m.qmp == nil {
		return nil
	}
	q := m.qmp
	m.qmp = nil
	return q.Close()
}

var errFrozen = errors.New("machine is frozen")

// Dial connects to the agent. A frozen machine is refused at once: its kernel
// would not answer.
func (m *vm) Dial(ctx context.Context) (net.Conn, error) {
	select {
	case <-m.done:
		return nil, fmt.Errorf("dial %s: %w", m.ID(), machine.ErrGone)
	default:
	}
	if m.Frozen() {
		return nil, fmt.Errorf("dial %s: %w", m.ID(), errFrozen)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-m.done:
			cancel(machine.ErrGone)
		case <-ctx.Done():
		}
	}()
	conn, err := dialAgent(ctx, m.handle.Spec.Slot.NetNS)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", m.ID(), errors.Join(err, context.Cause(ctx)))
	}
	return conn, nil
}

// Promote gives the machine its full CPU share.
func (m *vm) Promote(context.Context) error {
	if err := m.driver.groups.SetShares(m.group(), fullShares*uint64(m.handle.Spec.Size.VCPU)); err != nil {
		return fmt.Errorf("promote %s: %w", m.ID(), err)
	}
	return nil
}

// Frozen says whether the processors stand still.
func (m *vm) Frozen() bool { return m.frozen.Load() }

// change runs f with the machine's control connection. While it runs nothing
// else changes the machine.
func (m *vm) change(ctx context.Context, what string, f func(q *monitor) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.reach(ctx)
	if err == nil {
		err = f(m.qmp)
	}
	if err == nil {
		return nil
	}
	select {
	case <-m.done:
		err = machine.ErrGone
	default:
	}
	return fmt.Errorf("%s %s: %w", what, m.ID(), err)
}

// reach opens the control connection where there is none, or none any more.
// The caller holds mu.
func (m *vm) reach(ctx context.Context) (err error) {
	if m.qmp != nil {
		select {
		case <-m.qmp.ended:
			if err := m.closeMonitor(); err != nil {
				return err
			}
		default:
			return nil
		}
	}
	m.qmp, err = dialMonitor(ctx, m.dir())
	return err
}

// Freeze stops the processors.
func (m *vm) Freeze(ctx context.Context) error {
	return m.change(ctx, "freeze", func(q *monitor) error {
		if m.state.Frozen {
			return nil
		}
		s := m.state
		s.Frozen = true
		if err := m.put(s); err != nil {
			return err
		}
		if err := q.do(ctx, "stop", nil, nil); err != nil {
			// It may have been done all the same, or be about to.
			s.Frozen = false
			return errors.Join(err, m.put(s), m.agree(ctx))
		}
		return nil
	})
}

// Thaw lets the machine go on. A layer that a capture has taken gets another
// one on top first: its name stands for what the capture holds.
func (m *vm) Thaw(ctx context.Context) error {
	return m.change(ctx, "thaw", func(q *monitor) error {
		if !m.state.Frozen {
			return nil
		}
		if m.state.Captured {
			if err := m.addLayer(ctx, q); err != nil {
				return err
			}
		}
		if err := q.do(ctx, "cont", nil, nil); err != nil {
			return err
		}
		s := m.state
		s.Frozen = false
		return m.put(s)
	})
}

// agree makes QEMU and the state one again after a command whose end is not
// known. The caller holds mu.
func (m *vm) agree(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	if err := m.reach(ctx); err != nil {
		return err
	}
	s, err := settle(ctx, m.qmp, m.dir(), m.state)
	if err == nil {
		m.remember(s)
	}
	return err
}

// remember takes over a state that is written. The caller holds mu.
func (m *vm) remember(s state) {
	m.state = s
	m.frozen.Store(s.Frozen)
}

// put writes the state and remembers it.
func (m *vm) put(s state) error {
	if err := s.write(m.dir()); err != nil {
		return err
	}
	m.remember(s)
	return nil
}

// Stop ends the machine and removes everything of it. The first call's work
// goes on when a later caller's context ends; that caller gets its own
// context's error.
func (m *vm) Stop(ctx context.Context) error {
	go m.stop.Do(func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		defer cancel()
		m.stopErr = m.end(clean)
		close(m.stopped)
	})
	select {
	case <-m.stopped:
		return m.stopErr
	case <-ctx.Done():
		return fmt.Errorf("stop %s: %w", m.ID(), context.Cause(ctx))
	}
}

func (m *vm) end(ctx context.Context) error {
	d := m.driver
	select {
	case <-m.done: // nobody asked it to
		d.cfg.Log.Warn("machine ended by itself", "machine", m.ID(), "qemu", d.lastWords(m.ID()))
	default:
	}
	err := d.groups.Kill(ctx, m.group())
	if err == nil {
		select {
		case <-m.watched: // closes done before Stop returns
		case <-ctx.Done():
		}
	}
	err = errors.Join(err, m.detach(), d.remove(ctx, m.ID()))
	d.mu.Lock()
	if d.live[m.ID()] == m {
		delete(d.live, m.ID())
	}
	d.mu.Unlock()
	if err != nil {
		return fmt.Errorf("stop %s: %w", m.ID(), err)
	}
	return nil
}
