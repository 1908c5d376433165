package freeze

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// cgroups freezes by cgroup v2, one group a part: the kernel knows every
// member, whatever it did to get away, and no program notices.
type cgroups struct{ dirs [parts]*os.File }

// openCgroups makes the groups below root and proves on a process that they
// work: a group takes one, freezes and thaws.
func openCgroups(root string) (_ *cgroups, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err != nil {
		return nil, fmt.Errorf("cgroup: %s: %w", root, err)
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil, fmt.Errorf("cgroup: %s is no cgroup v2", root)
	}
	c := &cgroups{}
	defer func() {
		if err != nil {
			_ = c.close()
		}
	}()
	for part := range parts {
		dir := filepath.Join(root, part.String())
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("cgroup: %w", err)
		}
		if c.dirs[part], err = os.Open(dir); err != nil {
			return nil, fmt.Errorf("cgroup: %w", err)
		}
	}
	return c, c.prove()
}

func (c *cgroups) prove() error {
	cmd := exec.Command("/bin/true")
	c.place(Customer, cmd)
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("cgroup: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), Limit)
	defer cancel()
	return errors.Join(c.freeze(ctx, Customer), c.thaw(Customer))
}

func (c *cgroups) place(part Part, cmd *exec.Cmd) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.UseCgroupFD = true
	cmd.SysProcAttr.CgroupFD = int(c.dirs[part].Fd())
}

func (c *cgroups) started(Part, int) {}

func (c *cgroups) freeze(ctx context.Context, part Part) error {
	if err := c.write(part, "cgroup.freeze", "1"); err != nil {
		return err
	}
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for looks := 1; ; looks++ {
		events, err := os.ReadFile(filepath.Join(c.dirs[part].Name(), "cgroup.events"))
		if err != nil {
			return err
		}
		if bytes.Contains(events, []byte("frozen 1")) {
			return nil
		}
		if err := again(ctx, look, looks); err != nil {
			return err
		}
	}
}

func (c *cgroups) thaw(part Part) error { return c.write(part, "cgroup.freeze", "0") }

func (c *cgroups) write(part Part, file, value string) error {
	return os.WriteFile(filepath.Join(c.dirs[part].Name(), file), []byte(value), 0)
}

// close ends what is left in the groups and removes them.
func (c *cgroups) close() (all error) {
	for part, dir := range c.dirs {
		if dir == nil {
			continue
		}
		_ = c.write(Part(part), "cgroup.kill", "1")
		all = errors.Join(all, removeGroup(dir.Name()), dir.Close())
	}
	return all
}

// removeGroup waits for killed members to be gone.
func removeGroup(dir string) error {
	for deadline := time.Now().Add(Limit); ; time.Sleep(time.Millisecond) {
		err := unix.Rmdir(dir)
		if err == nil || err == unix.ENOENT {
			return nil
		}
		if err != unix.EBUSY || time.Now().After(deadline) {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
	}
}
