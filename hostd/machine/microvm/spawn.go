package microvm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine/cgroup"
)

// socketName is QEMU's control socket in a machine's folder.
const socketName = "qmp.sock"

// logName is what QEMU itself says, in a machine's folder.
const logName = "qemu.log"

// spawn starts QEMU confined, in a machine's folder and cgroup, both of which
// are there. The command gets the control socket; its files stay the caller's.
func (d *Driver) spawn(id string, uid uint32, fileLimit int64, c command) (*cgroup.Process, error) {
	dir := d.dir(id)
	socket, err := listen(dir, socketName)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	defer socket.Close()
	c.monitor(socket)
	log, err := os.OpenFile(filepath.Join(dir, logName), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	config, err := json.Marshal(jail{Dir: dir, Procs: d.groups.Procs(d.group(id)), UID: int(uid), File: fileLimit,
		KVM: d.accel.name == KVM, Path: d.qemu, Args: append([]string{"qemu"}, c.args...)})
	if err != nil {
		return nil, err
	}
	cmd := &exec.Cmd{Path: "/proc/self/exe", Args: []string{jailName}, Env: []string{}, Dir: "/",
		Stdin: nil, Stdout: log, Stderr: log, ExtraFiles: c.files}
	pidfd := -1
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, PidFD: &pidfd,
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWNET}
	return start(cmd, config, &pidfd)
}

// start starts a command whose process reads config, and pins it.
func start(cmd *exec.Cmd, config []byte, pidfd *int) (*cgroup.Process, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer read.Close()
	defer write.Close()
	cmd.Stdin = read
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := cgroup.Pinned(cmd.Process.Pid, *pidfd)
	// Not Wait: the process outlives this one, and is collected by its pidfd.
	err = cmd.Process.Release()
	if err == nil {
		_, err = write.Write(config)
	}
	if err != nil {
		return nil, errors.Join(err, end(p))
	}
	return p, nil
}

// end kills a child of this process and waits until it is gone.
func end(p *cgroup.Process) error {
	err := p.Kill()
	if err == nil && p.Wait() {
		p.Reap()
	}
	return errors.Join(err, p.Close())
}

// listen makes a listening socket as a bare descriptor. It is bound by way of
// its open folder: an address has room for 107 bytes of path (unix(7)).
func listen(dir, name string) (*os.File, error) {
	folder, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	socket := os.NewFile(uintptr(fd), name)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: within(folder, name)}); err != nil {
		return nil, errors.Join(err, socket.Close())
	}
	if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
		return nil, errors.Join(err, socket.Close())
	}
	return socket, nil
}

func within(folder *os.File, name string) string {
	return "/proc/self/fd/" + strconv.Itoa(int(folder.Fd())) + "/" + name
}

// dialMonitor connects to the control socket in a machine's folder.
func dialMonitor(ctx context.Context, dir string) (*monitor, error) {
	folder, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", within(folder, socketName))
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	return openMonitor(ctx, conn.(*net.UnixConn))
}

// maxWords is room for a panic with its call trace, bytes.
const maxWords = 8 << 10

// lastWords is the end of what QEMU and the guest's console said, for errors
// and logs.
func (d *Driver) lastWords(id string) string {
	f, err := os.Open(filepath.Join(d.dir(id), logName))
	if err != nil {
		return ""
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return ""
	}
	// Only the end is read: a QEMU that its guest has taken over may write as
	// much as a disk.
	words := make([]byte, min(info.Size(), maxWords))
	n, _ := f.ReadAt(words, info.Size()-int64(len(words))) // what came of it is enough
	return string(bytes.TrimSpace(words[:n]))
}
