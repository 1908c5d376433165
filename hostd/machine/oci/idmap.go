package oci

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// idmaps keeps one user namespace a slot range: mount_setattr takes the
// mapping of an idmapped mount in this form only. Ranges repeat with slots, so
// there are as many as slots.
type idmaps struct {
	mu     sync.Mutex
	byBase map[uint32]*os.File // guarded by mu
}

// get gives the namespace that maps ids 0..65535 to base and up. The file
// stays the pool's.
func (m *idmaps) get(base uint32) (*os.File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if f, ok := m.byBase[base]; ok {
		return f, nil
	}
	f, err := newUserNamespace(base)
	if err != nil {
		return nil, fmt.Errorf("user namespace for ids from %d: %w", base, err)
	}
	if m.byBase == nil {
		m.byBase = map[uint32]*os.File{}
	}
	m.byBase[base] = f
	return f, nil
}

func (m *idmaps) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	for _, f := range m.byBase {
		errs = append(errs, f.Close())
	}
	m.byBase = nil
	return errors.Join(errs...)
}

// newUserNamespace starts a process that waits in the namespace just until the
// namespace is held by a file.
func newUserNamespace(base uint32) (ns *os.File, err error) {
	mapping := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(base), Size: idRange}}
	cmd := exec.Command("cat")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: mapping, GidMappings: mapping,
		GidMappingsEnableSetgroups: true,
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	ns, err = os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	closed := stdin.Close() // cat ends
	if end := errors.Join(closed, cmd.Wait()); end != nil && err == nil {
		return nil, errors.Join(end, ns.Close())
	}
	return ns, err
}

// mountIDMapped binds source read-only at target, its owners shifted by the
// mapping of ns (mount_setattr(2), MOUNT_ATTR_IDMAP).
func mountIDMapped(source, target string, ns *os.File) error {
	fd, err := idMapped(source, ns)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount %s: %w", target, err)
	}
	return nil
}

// idMapped gives a detached mount; closing the descriptor ends it.
func idMapped(source string, ns *os.File) (int, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("open_tree %s: %w", source, err)
	}
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
		Attr_set:  unix.MOUNT_ATTR_IDMAP | unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV,
		Userns_fd: uint64(ns.Fd()),
	})
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("mount_setattr %s: %w", source, err)
	}
	return fd, nil
}
