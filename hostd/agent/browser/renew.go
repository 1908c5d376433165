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
	"sync"
	"syscall"
	"time"

	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/hostd/agent/procfs"
	"github.com/go-rod/rod/lib/proto"
)

// bare is a Chrome that has no page and no renderer. Strip makes it so, and
// what lacks comes with Page.
type bare struct {
	// areas are what processes of a clone have to find wiped, while Chrome
	// stands still after Strip. Calls of Strip and Renew come one at a time.
	areas map[int][]area
	fill  sync.Once
	done  chan struct{} // closed when the page is there
}

// Strip leaves nothing in Chrome that was drawn at random and would have to end
// in a clone: it closes the page, whose ids in CDP were drawn, and ends all
// renderers, since V8 seeds Math.random when a process begins. It then waits
// until Chrome has done what it does once after its start, when calm is asked
// for, and has it stand still.
func (b *Browser) Strip(ctx context.Context, calm bool) error {
	c, err := b.wait(ctx)
	if err != nil {
		return fmt.Errorf("strip chrome: %w", err)
	}
	if err := b.strip(ctx, c, calm); err != nil {
		return fmt.Errorf("strip chrome: %w", err)
	}
	return nil
}

func (b *Browser) strip(ctx context.Context, c *chrome, calm bool) error {
	if was := c.bare.Load(); was != nil {
		if was.areas != nil {
			return nil // it was done, and Chrome has not run since
		}
		// Again: a page that is being opened has to be there to be closed.
		if err := errors.Join(b.cfg.Freezer.Thaw(freeze.Browser), b.Page(ctx)); err != nil {
			return err
		}
	}
	now := &bare{done: make(chan struct{})}
	c.bare.Store(now) // from here on no page replaces the last one
	for _, id := range c.pages.ids() {
		if err := c.call(ctx, proto.TargetCloseTarget{TargetID: id}, nil); err != nil && c.pages.has(id) {
			return err
		}
	}
	if err := c.awaitPages(ctx, func() bool { return len(c.pages.ids()) == 0 }); err != nil {
		return err
	}
	if err := c.endRenderers(ctx); err != nil {
		return err
	}
	if calm {
		c.awaitCalm(ctx, b.cfg.Calm)
	}
	for {
		if err := b.cfg.Freezer.Freeze(ctx, freeze.Browser); err != nil {
			return err
		}
		if len(c.renderers()) == 0 {
			break
		}
		// One that began meanwhile.
		if err := errors.Join(b.cfg.Freezer.Thaw(freeze.Browser), c.endRenderers(ctx)); err != nil {
			return err
		}
	}
	areas, err := c.wiped()
	now.areas = areas
	return err
}

// Renew makes a Chrome whose memory was cloned share nothing random with its
// siblings; the kernel's own randomness must be fresh already. It needs the
// right to write other processes' memory. Chrome goes on without a page: Page
// makes one.
//
// What Strip leaves (browser, GPU process, zygotes) draws from the kernel at
// each need (base::RandBytes), but for BoringSSL's generators, of TLS among
// others: they are told that the process forked, which a clone is, before
// Chrome runs.
func (b *Browser) Renew(ctx context.Context) error {
	c, err := b.wait(ctx)
	if err != nil {
		return fmt.Errorf("renew chrome: %w", err)
	}
	if err := b.strip(ctx, c, false); err != nil {
		return fmt.Errorf("renew chrome: %w", err)
	}
	var all error
	lacks := c.bare.Load()
	for pid, areas := range lacks.areas {
		if err := wipe(pid, areas); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ESRCH) {
			all = errors.Join(all, err)
		}
	}
	if all != nil { // it stands still for ever rather than repeat what its siblings draw
		return fmt.Errorf("renew chrome: %w", all)
	}
	lacks.areas = nil
	if err := b.cfg.Freezer.Thaw(freeze.Browser); err != nil {
		return fmt.Errorf("renew chrome: %w", err)
	}
	return nil
}

// Page returns when Chrome shows a page in its default context, which it always
// does but after Renew; then this opens one. Nobody may see Chrome's targets
// before.
func (b *Browser) Page(ctx context.Context) error {
	for {
		c, err := b.wait(ctx)
		if err != nil {
			return fmt.Errorf("page: %w", err)
		}
		lacks := c.bare.Load()
		if lacks == nil {
			return nil
		}
		lacks.fill.Do(func() { c.background(func() { c.open(lacks) }) })
		select {
		case <-lacks.done:
			return nil
		case <-c.gone: // the next one has a page
		case <-ctx.Done():
			return fmt.Errorf("page: %w", context.Cause(ctx))
		}
	}
}

// open opens the page that lacks, at the size of the session. A Chrome that
// cannot do it is ended, so that another one starts.
func (c *chrome) open(lacks *bare) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-c.gone:
			cancel()
		case <-ctx.Done():
		}
	}()
	var made proto.TargetCreateTargetResult
	err := c.call(ctx, proto.TargetCreateTarget{URL: "about:blank"}, &made)
	if err == nil {
		err = c.awaitPages(ctx, func() bool { return c.pages.has(made.TargetID) })
	}
	if v := c.wanted(); err == nil && v != c.launched {
		err = c.size(ctx, made.TargetID, v, nil)
	}
	if err != nil {
		c.log.Error("no page in a renewed chrome", "err", err)
		_ = c.proc.cmd.Process.Kill() // it may be dead already
		return
	}
	c.bare.CompareAndSwap(lacks, nil)
	close(lacks.done)
}

// calmCPU is how little processor time Chrome takes in calmFor when it has
// nothing to do, clock ticks (proc(5)); even emulated.
const (
	calmFor = 3 * time.Second
	calmCPU = 10
)

// awaitCalm waits until a Chrome of some age does nothing, as long as that may
// take: what it puts off after its start it does half a minute and a minute
// later, and in each clone if it has not done it before.
func (c *chrome) awaitCalm(ctx context.Context, age time.Duration) {
	if age == 0 {
		return
	}
	look := time.NewTicker(calmFor)
	defer look.Stop()
	for last := -calmCPU; ; {
		used := c.ticks()
		if time.Since(c.began) > 4*age || used-last < calmCPU && time.Since(c.began) > age {
			return
		}
		last = used
		select {
		case <-look.C:
		case <-c.gone:
			return
		case <-ctx.Done():
			return
		}
	}
}

// ticks is the processor time that all of Chrome has taken (proc(5)).
func (c *chrome) ticks() (sum int) {
	for _, pid := range c.pids() {
		stat, _ := os.ReadFile(procfs.Path(pid, "stat"))
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])) // from field 3 on
		for i := 11; i <= 12 && i < len(fields); i++ {
			n, _ := strconv.Atoi(fields[i])
			sum += n
		}
	}
	return sum
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

// renderers lists the processes that show pages, or wait to.
func (c *chrome) renderers() (list []int) {
	for _, pid := range c.pids() {
		line, _ := os.ReadFile(procfs.Path(pid, "cmdline"))
		// Children of a zygote write their arguments into one string.
		if bytes.Contains(line, []byte("--type=renderer")) {
			list = append(list, pid)
		}
	}
	return list
}

// endRenderers kills the renderers and waits until Chrome has seen it: else it
// might give a new page to one that is dead.
func (c *chrome) endRenderers(ctx context.Context) error {
	killed := map[int]bool{}
	for _, pid := range c.renderers() {
		if syscall.Kill(pid, syscall.SIGKILL) == nil {
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

// wiped lists what is to be wiped of each process. Chrome stands still.
func (c *chrome) wiped() (map[int][]area, error) {
	all := map[int][]area{}
	for _, pid := range c.pids() {
		areas, err := wiped(pid)
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ESRCH) {
			return nil, err
		}
		if len(areas) > 0 {
			all[pid] = areas
		}
	}
	return all, nil
}

// wipe zeroes the memory that a process has marked to be zeroed in its children
// (madvise(2), MADV_WIPEONFORK): random generators keep a flag there. It does to
// a standing process what the kernel does to the child of a fork.
func wipe(pid int, areas []area) error {
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
