package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
)

// ErrFull says that no index is free.
var ErrFull = errors.New("no free slot on this host")

// DialEgress opens a connection to proxyd on which the Hello has been written. It
// is called once a client has said something.
type DialEgress func(ctx context.Context) (net.Conn, error)

// Slot is one machine's place in the network. Safe for concurrent use.
type Slot struct {
	net  *Network
	info machine.Slot

	egress atomic.Pointer[DialEgress] // nil: connections are refused
	cancel context.CancelFunc         // ends listeners and all their connections
	served sync.WaitGroup             // goroutines of listeners

	closeOnce sync.Once
	closeErr  error
}

// Info is what a driver needs of the slot.
func (s *Slot) Info() machine.Slot { return s.info }

// SetEgress says how the slot's egress listener reaches proxyd. Until it is
// called, and after SetEgress(nil), connections to the listener are reset.
func (s *Slot) SetEgress(dial DialEgress) {
	if dial == nil {
		s.egress.Store(nil)
		return
	}
	s.egress.Store(&dial)
}

// Make makes a slot with the lowest free index. Slots can be made at once.
func (n *Network) Make(ctx context.Context) (*Slot, error) {
	for index := range n.Slots() {
		if !n.claim(index) {
			continue
		}
		s, err := n.makeSlot(ctx, index)
		if err == nil {
			return s, nil
		}
		n.release(index)
		if !errors.Is(err, fs.ErrExist) { // one of an earlier hostd: Sweep's to judge
			return nil, fmt.Errorf("make slot %d: %w", index, err)
		}
	}
	return nil, fmt.Errorf("make slot: %w", ErrFull)
}

func (n *Network) makeSlot(ctx context.Context, index int) (*Slot, error) {
	info := n.info(index)
	f, err := os.OpenFile(info.NetNS, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return nil, err
	}
	f.Close()
	s, err := n.buildSlot(ctx, info)
	if err != nil {
		return nil, errors.Join(err, n.remove(context.WithoutCancel(ctx), index))
	}
	return s, nil
}

func (n *Network) buildSlot(ctx context.Context, info machine.Slot) (*Slot, error) {
	var socks *sockets
	err := n.onThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := unix.Mount("/proc/thread-self/ns/net", info.NetNS, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount %s: %w", info.NetNS, err)
		}
		if err := n.inside(info); err != nil {
			return err
		}
		if err := loadRules(ctx, slotRules, n.ruleData(&info)); err != nil {
			return err
		}
		socks, err = listen()
		return err
	})
	if err == nil {
		err = n.outside(info)
	}
	if err != nil {
		socks.close()
		return nil, err
	}
	return n.serve(info, socks)
}

// Adopt takes over a slot that an earlier hostd made. Its rules are written
// anew, so that what the configuration says now is in force. An error leaves
// the slot to Sweep.
func (n *Network) Adopt(ctx context.Context, slot machine.Slot) (*Slot, error) {
	if slot != n.info(slot.Index) {
		return nil, fmt.Errorf("adopt slot %d: it was made under another configuration (%+v)", slot.Index, slot)
	}
	if !n.claim(slot.Index) {
		return nil, fmt.Errorf("adopt slot %d: it is in use", slot.Index)
	}
	s, err := n.adopt(ctx, slot)
	if err != nil {
		n.release(slot.Index)
		return nil, fmt.Errorf("adopt slot %d: %w", slot.Index, err)
	}
	return s, nil
}

func (n *Network) adopt(ctx context.Context, slot machine.Slot) (*Slot, error) {
	var socks *sockets
	err := n.inNamespace(slot.NetNS, func() (err error) {
		if err := n.checkTap(); err != nil {
			return err
		}
		if err := loadRules(ctx, slotRules, n.ruleData(&slot)); err != nil {
			return err
		}
		socks, err = listen()
		return err
	})
	if err == nil {
		err = checkLink(slot.Name)
	}
	if err != nil {
		socks.close()
		return nil, err
	}
	return n.serve(slot, socks)
}

// serve starts what hostd does for a slot and books it as open.
func (n *Network) serve(info machine.Slot, socks *sockets) (*Slot, error) {
	ctx, cancel := context.WithCancel(context.Background())
	s := &Slot{net: n, info: info, cancel: cancel}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		cancel()
		socks.close()
		return nil, errors.New("network is closed")
	}
	n.slots[info.Index] = s
	s.start(ctx, socks)
	return s, nil
}

// Close removes the slot and everything of it, open connections included. The
// machine in it must have been stopped. Idempotent; returns the first call's
// result.
func (s *Slot) Close(ctx context.Context) error {
	s.closeOnce.Do(func() {
		s.detach()
		if err := s.net.remove(context.WithoutCancel(ctx), s.info.Index); err != nil {
			s.closeErr = fmt.Errorf("close slot %d: %w", s.info.Index, err)
		}
		s.net.release(s.info.Index)
	})
	return s.closeErr
}

// detach ends hostd's part of the slot and waits until it is over.
func (s *Slot) detach() {
	s.cancel()
	s.served.Wait()
}

// remove takes away the link, the host's connection tracking and the name of a
// slot, whatever of it exists. The namespace itself ends with its last process.
func (n *Network) remove(_ context.Context, index int) error {
	info := n.info(index)
	err := errors.Join(removeLink(info.Name), forgetConnections(n.addr(index)))
	if e := unix.Unmount(info.NetNS, unix.MNT_DETACH); e != nil && e != unix.EINVAL && e != unix.ENOENT {
		err = errors.Join(err, fmt.Errorf("unmount %s: %w", info.NetNS, e))
	}
	if e := os.Remove(info.NetNS); e != nil && !errors.Is(e, fs.ErrNotExist) {
		err = errors.Join(err, e)
	}
	return err
}

// onThread runs fn on an OS thread of its own, which fn may take into another
// network namespace. A thread that cannot come back ends with its goroutine.
func (n *Network) onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := fn()
		if unix.Setns(int(n.host.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// inNamespace runs fn on a thread inside the namespace at path.
func (n *Network) inNamespace(path string, fn func() error) error {
	ns, err := os.Open(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	return n.onThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter %s: %w", path, err)
		}
		return fn()
	})
}
