package browser

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/hostd/agent/procfs"
	"github.com/go-rod/rod/lib/proto"
)

// What is done to Chrome's processes from outside.

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
func wiped(pid int) ([]area, error) {
	f, err := os.Open(procfs.Path(pid, "smaps"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return wipedIn(f)
}

// wipedIn reads smaps to the end: an area that is missed is one that clones share.
func wipedIn(smaps io.Reader) (list []area, err error) {
	var at area
	lines := bufio.NewScanner(smaps)
	for lines.Scan() {
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
	return list, lines.Err()
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
