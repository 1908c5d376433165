package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// peer spawns the very Chromium of the machines as one would without Berth:
// the same binary, libraries and fonts (the guest image under an overlay), the
// same flags, environment and ordinary user, read off a machine's Chrome; but
// no container, cgroup limits, agent, relay or egress proxy. It lives in a
// mount namespace of one thread, so nothing stays when the bench ends.
type peer struct {
	dir   string // holds overlay and profiles
	args  []string
	env   []string
	jobs  chan func()
	count int
}

// guestUser is the image's ordinary user.
const guestUser = 1000

// withPeer makes the peer once, in the likeness of a running machine's Chrome.
func (b *bench) withPeer(ctx context.Context) error {
	if b.peer != nil {
		return nil
	}
	s, err := b.stack.create(ctx, "browser")
	if err != nil {
		return err
	}
	defer b.stack.release(context.WithoutCancel(ctx), s.Id)
	args, env, err := b.stack.anyChrome()
	if err != nil {
		return err
	}
	p, err := newPeer(args, env)
	if err != nil {
		return err
	}
	b.peer = p
	b.undo = append(b.undo, p.close)
	return nil
}

// anyChrome reads flags and environment off a machine's Chrome; all are alike.
func (s *stack) anyChrome() (args, env []string, err error) {
	for _, group := range s.machines() {
		pid, args, err := chromeOf(group)
		if err != nil {
			continue
		}
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil {
			return nil, nil, err
		}
		return args, strings.Split(strings.TrimRight(string(b), "\x00"), "\x00"), nil
	}
	return nil, nil, errors.New("no machine runs a Chrome")
}

func newPeer(args, env []string) (*peer, error) {
	dir, err := os.MkdirTemp(filepath.Dir(os.Getenv("BERTH_HOME")), "berth-bench-peer.")
	if err != nil {
		return nil, err
	}
	p := &peer{dir: dir, env: env, jobs: make(chan func())}
	for _, a := range args {
		// The profile is each one's own; there is no egress proxy.
		if !strings.HasPrefix(a, "--user-data-dir=") && !strings.HasPrefix(a, "--proxy-server=") {
			p.args = append(p.args, a)
		}
	}
	ready := make(chan error)
	go p.thread(ready)
	if err := <-ready; err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return p, nil
}

// thread owns the mount namespace; what it starts is born in it.
func (p *peer) thread(ready chan<- error) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	ready <- p.enter(os.Getenv("BERTH_IMAGE_BASE"))
	for job := range p.jobs {
		job()
	}
}

// enter makes the image the root of this thread.
func (p *peer) enter(image string) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	root := filepath.Join(p.dir, "root")
	for _, d := range []string{"root", "upper", "work"} {
		if err := os.Mkdir(filepath.Join(p.dir, d), 0o755); err != nil {
			return err
		}
	}
	mounts := []struct {
		source, target, kind string
		flags                uintptr
		data                 string
	}{
		{"", "/", "", unix.MS_REC | unix.MS_PRIVATE, ""},
		{"overlay", root, "overlay", 0, "lowerdir=" + image + ",upperdir=" + p.dir + "/upper,workdir=" + p.dir + "/work,volatile"},
		{"proc", root + "/proc", "proc", 0, ""},
		{"/dev", root + "/dev", "", unix.MS_BIND | unix.MS_REC, ""},
		{"shm", root + "/dev/shm", "tmpfs", 0, "mode=1777"},
	}
	for _, m := range mounts {
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	if err := unix.Chdir(root); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil { // the old root lies below, see pivot_root(2)
		return fmt.Errorf("pivot_root: %w", err)
	}
	return unix.Unmount(".", unix.MNT_DETACH)
}

// do runs f on the peer's thread.
func (p *peer) do(f func() error) error {
	done := make(chan error)
	p.jobs <- func() { done <- f() }
	return <-done
}

func (p *peer) close() error {
	close(p.jobs)
	return os.RemoveAll(p.dir)
}

// chrome is one spawned Chromium.
type chrome struct {
	cmd   *exec.Cmd
	group string // cgroup of all its processes
	url   string // DevTools endpoint
}

// spawn starts a Chromium with a new profile and waits until it says where its
// DevTools are. began is when it was started: profile and cgroup were there.
func (p *peer) spawn() (c *chrome, began time.Time, err error) { return p.spawnWith(p.args) }

// stock are the flags without which there would be no such browser at all.
var stock = []string{"/usr/lib/chromium/chromium", "--headless=new", "--remote-debugging-port=0", "about:blank"}

func (p *peer) spawnWith(flags []string) (c *chrome, began time.Time, err error) {
	p.count++
	group := filepath.Join(unified(), fmt.Sprintf("berth-bench.%d.%d", os.Getpid(), p.count))
	if err := os.Mkdir(group, 0o755); err != nil {
		return nil, began, err
	}
	dir, err := os.Open(group)
	if err != nil {
		return nil, began, err
	}
	defer dir.Close()
	profile := fmt.Sprintf("/home/user/profile-%d", p.count)
	c = &chrome{group: group}
	// As the agent does, by way of setpriv: both sides pay for it.
	args := append([]string{"--reuid", strconv.Itoa(guestUser), "--regid", strconv.Itoa(guestUser), "--clear-groups",
		"--no-new-privs", "--inh-caps=-all", "--"}, slices.Insert(slices.Clone(flags), 1, "--user-data-dir="+profile)...)
	c.cmd = exec.Command("setpriv", args...)
	c.cmd.Path = "/usr/bin/setpriv" // of the image
	c.cmd.Err = nil
	c.cmd.Env, c.cmd.Dir = p.env, "/home/user"
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	stderr, err := c.cmd.StderrPipe()
	if err != nil {
		return nil, began, err
	}
	err = p.do(func() error {
		if err := errors.Join(os.Mkdir(profile, 0o700), os.Chown(profile, guestUser, guestUser)); err != nil {
			return err
		}
		began = time.Now()
		return c.cmd.Start()
	})
	if err != nil {
		return nil, began, errors.Join(fmt.Errorf("spawn: %w", err), os.Remove(group))
	}
	lines := bufio.NewScanner(stderr)
	var said []string
	for lines.Scan() {
		if _, url, ok := strings.Cut(lines.Text(), "DevTools listening on "); ok {
			c.url = url
			go io.Copy(io.Discard, stderr)
			return c, began, nil
		}
		said = append(said, lines.Text())
	}
	return nil, began, errors.Join(fmt.Errorf("chromium did not start: %q", said), c.kill())
}

// kill ends all processes of a Chromium and returns when they are gone.
func (c *chrome) kill() error {
	if err := os.WriteFile(filepath.Join(c.group, "cgroup.kill"), []byte("1"), 0); err != nil {
		return err
	}
	_ = c.cmd.Wait() // killed, as it says
	return poll(context.Background(), 10*time.Second, "chromium's processes are gone", func() (bool, error) {
		err := os.Remove(c.group)
		return err == nil, err
	})
}
