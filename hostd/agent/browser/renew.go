package browser

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/hostd/agent/procfs"
	"github.com/go-rod/rod/lib/proto"
)

// Renew makes a Chrome whose memory was cloned share nothing random with its
// siblings; the kernel's own randomness must be fresh already. It needs the
// right to write other processes' memory.
//
// Renderers are killed, the spare one too: V8 draws Math.random from a state
// that is seeded when a process begins. The page is replaced: its ids in CDP
// were drawn before. What stays (browser, GPU process, zygotes) draws from the
// kernel at each need (base::RandBytes), but for BoringSSL's generators, of TLS
// among others: they are told that the process forked, which a clone is.
func (b *Browser) Renew(ctx context.Context) error {
	c, err := b.wait(ctx)
	if err != nil {
		return fmt.Errorf("renew chrome: %w", err)
	}
	if err := b.wipe(ctx, c); err != nil {
		return fmt.Errorf("renew chrome: %w", err)
	}
	old := c.pages.ids()
	if err := c.endRenderers(ctx); err != nil {
		return fmt.Errorf("renew chrome: %w", err)
	}
	var made proto.TargetCreateTargetResult
	if err := c.call(ctx, proto.TargetCreateTarget{URL: "about:blank"}, &made); err != nil {
		return fmt.Errorf("renew chrome: %w", err)
	}
	if err := c.awaitPages(ctx, func() bool { return c.pages.has(made.TargetID) }); err != nil {
		return fmt.Errorf("renew chrome: %w", err)
	}
	for _, id := range old {
		if err := c.call(ctx, proto.TargetCloseTarget{TargetID: id}, nil); err != nil && c.pages.has(id) {
			return fmt.Errorf("renew chrome: %w", err)
		}
	}
	err = c.awaitPages(ctx, func() bool { return len(c.pages.ids()) == 1 })
	if err != nil {
		return fmt.Errorf("renew chrome: %w", err)
	}
	return nil
}

// awaitPages waits for what Chrome tells right after an answer.
func (c *chrome) awaitPages(ctx context.Context, ok func() bool) error {
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for !ok() {
		select {
		case <-look.C:
		case <-c.gone:
			return c.cause()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// pids lists the processes of this Chrome.
func (c *chrome) pids() (list []int) {
	for _, pid := range procfs.PIDs() {
		if ours("/proc/"+strconv.Itoa(pid), c.proc.cmd.Process.Pid, c.proc.gid) {
			list = append(list, pid)
		}
	}
	return list
}

// endRenderers kills the renderers and waits until Chrome has seen it: else it
// might give a new page to one that is dead.
func (c *chrome) endRenderers(ctx context.Context) error {
	killed := map[int]bool{}
	for _, pid := range c.pids() {
		line, _ := os.ReadFile(procfs.Path(pid, "cmdline"))
		// Children of a zygote write their arguments into one string.
		if bytes.Contains(line, []byte("--type=renderer")) && syscall.Kill(pid, syscall.SIGKILL) == nil {
			killed[pid] = true
		}
	}
	for {
		var known proto.SystemInfoGetProcessInfoResult
		if err := c.call(ctx, proto.SystemInfoGetProcessInfo{}, &known); err != nil {
			return err
		}
		if !slices.ContainsFunc(known.ProcessInfo, func(p *proto.SystemInfoProcessInfo) bool { return killed[p.ID] }) {
			return nil
		}
	}
}

// wipe does to a standing Chrome what the kernel does to the child of a fork.
func (b *Browser) wipe(ctx context.Context, c *chrome) error {
	if err := b.cfg.Freezer.Freeze(ctx, freeze.Browser); err != nil {
		return err
	}
	var all error
	for _, pid := range c.pids() {
		if err := wipeOnFork(pid); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ESRCH) {
			all = errors.Join(all, err)
		}
	}
	return errors.Join(all, b.cfg.Freezer.Thaw(freeze.Browser))
}

// wipeOnFork zeroes the memory that a process has marked to be zeroed in its
// children (madvise(2), MADV_WIPEONFORK): random generators keep a flag there.
func wipeOnFork(pid int) error {
	areas, err := wiped(pid)
	if err != nil || len(areas) == 0 {
		return err
	}
	mem, err := os.OpenFile(procfs.Path(pid, "mem"), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer mem.Close()
	for _, a := range areas {
		if _, err := mem.WriteAt(make([]byte, a.end-a.start), a.start); err != nil {
			return err
		}
	}
	return nil
}

// maxWiped bounds an area that is taken for such a flag, bytes.
const maxWiped = 1 << 20

type area struct{ start, end int64 }

// wiped lists the areas of a process with the flag "wf" in smaps (proc(5)).
func wiped(pid int) (list []area, err error) {
	f, err := os.Open(procfs.Path(pid, "smaps"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var at area
	for lines := bufio.NewScanner(f); lines.Scan(); {
		line := lines.Text()
		name, rest, _ := strings.Cut(line, " ")
		if start, end, ok := strings.Cut(name, "-"); ok {
			at.start, _ = strconv.ParseInt(start, 16, 64)
			at.end, _ = strconv.ParseInt(end, 16, 64)
		}
		if name == "VmFlags:" && strings.Contains(" "+rest+" ", " wf ") && at.end > at.start && at.end-at.start <= maxWiped {
			list = append(list, at)
		}
	}
	return list, nil
}
