package freeze

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"math"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/berth-dev/berth/hostd/agent/procfs"
)

// signals freezes by SIGSTOP. Ancestors stop before their descendants and
// continue after them: a bash that sees its child stopped would take it for a
// job that was suspended.
type signals struct {
	machine bool
	gid     int // of Chrome, 0: unknown

	mu     sync.Mutex
	chrome map[int]bool // guarded by mu: sessions (setsid) of Chrome

	stopped [parts][]ident // by us, in the order they were stopped
}

// ident names a process for good: its number comes again, with its start time
// it does not.
type ident struct {
	pid   int
	start string // /proc/PID/stat field 22
}

type process struct {
	ident
	ppid, session int
	state         byte
	threads       int
}

func (s *signals) place(Part, *exec.Cmd) {}

func (s *signals) started(part Part, pid int) {
	if part == Browser {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.chrome[pid] = true
	}
}

func (s *signals) close() error { return nil }

// freeze sweeps until nothing runs: what was stopped forks no more, so each
// sweep only meets what was forked before. A sweep stops the nearest to the root
// that still run, and the next looks whether they do: a signal takes a moment to
// stop a process, in which it could see its child stop, or end a fork.
//
// A look is no snapshot: it may miss the child of one that forked or ended
// meanwhile. So two looks in a row must find the same processes, and all of them
// still: what ran after the first one's end would descend from a process that it
// did not list and the second does.
func (s *signals) freeze(ctx context.Context, part Part) error {
	look := time.NewTicker(200 * time.Microsecond)
	defer look.Stop()
	var before []ident // what the look before found, if all of it stood still
	for looks := 1; ; looks++ {
		members, complete := s.members(part)
		runs := s.sweep(part, members)
		if now := idents(members); runs || !complete {
			before = nil
		} else if before != nil && slices.Equal(now, before) {
			return nil
		} else {
			before = now
		}
		if err := again(ctx, look, looks); err != nil {
			return err
		}
	}
}

// sweep stops those of the members that run and have the fewest ancestors; runs
// says that there were any.
func (s *signals) sweep(part Part, members []member) (runs bool) {
	level := 0
	for _, p := range members {
		if runs && p.depth > level {
			break
		}
		if still(p.process) {
			continue // stopped by us, or by the customer, whose matter that stays
		}
		runs, level = true, p.depth
		if !slices.Contains(s.stopped[part], p.ident) && send(p.ident, syscall.SIGSTOP) {
			s.stopped[part] = append(s.stopped[part], p.ident)
		}
	}
	return runs
}

// idents is never nil.
func idents(members []member) []ident {
	all := make([]ident, 0, len(members))
	for _, m := range members {
		all = append(all, m.ident)
	}
	return all
}

func (s *signals) thaw(part Part) error {
	for _, id := range slices.Backward(s.stopped[part]) {
		send(id, syscall.SIGCONT)
	}
	s.stopped[part] = nil
	return nil
}

// member is a process and how many ancestors it has in the machine.
type member struct {
	process
	depth int
}

// members lists the part's processes, ancestors first. complete says that every
// process of the machine that was seen could also be read.
func (s *signals) members(part Part) (members []member, complete bool) {
	all := map[int]process{}
	complete = true
	for _, pid := range procfs.PIDs() {
		p, ok := readProcess(pid)
		if !ok {
			complete = false
			continue
		}
		all[pid] = p
	}
	for _, p := range all {
		depth, mine := s.depth(all, p)
		if mine && p.state != 'X' && s.part(p) == part {
			members = append(members, member{p, depth})
		}
	}
	slices.SortFunc(members, func(a, b member) int { return cmp.Or(a.depth-b.depth, a.pid-b.pid) })
	return members, complete
}

// depth is how many ancestors a process has, and whether it may be stopped.
func (s *signals) depth(all map[int]process, p process) (depth int, mine bool) {
	mine = s.machine && p.pid != 1 && p.ppid != 0
	for ; depth < math.MaxInt16; depth++ { // a scan is no snapshot: parents may seem to form a ring
		if p.ppid == os.Getpid() {
			return depth, true
		}
		parent, ok := all[p.ppid]
		if !ok {
			break
		}
		p = parent
	}
	return depth, mine
}

func (s *signals) part(p process) Part {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.chrome[p.session] || s.gid != 0 && group(p.pid) == s.gid {
		return Browser
	}
	return Customer
}

// still says whether no thread of the process runs.
func still(p process) bool {
	if p.threads <= 1 {
		return stopped(p.state, procfs.Path(p.pid, "status"))
	}
	tasks, err := os.ReadDir(procfs.Path(p.pid, "task"))
	if err != nil {
		return os.IsNotExist(err)
	}
	for _, task := range tasks {
		dir := procfs.Path(p.pid, "task/"+task.Name())
		fields, ok := statFields(dir + "/stat")
		if ok && !stopped(fields[0][0], dir+"/status") {
			return false
		}
	}
	return true
}

// stopped reads a thread's state. One that waits in the kernel (D: for a disk,
// or after vfork for its child) with a stop signal pending comes out of it only
// to stop.
func stopped(state byte, status string) bool {
	switch state {
	case 'T', 't', 'Z', 'X':
		return true
	case 'D':
		pending, err := strconv.ParseUint(field(status, "ShdPnd:"), 16, 64)
		return err == nil && pending&(1<<(syscall.SIGSTOP-1)) != 0
	}
	return false
}

// group is the effective group of a process.
func group(pid int) int {
	ids := strings.Fields(field(procfs.Path(pid, "status"), "Gid:"))
	if len(ids) < 2 {
		return -1
	}
	gid, err := strconv.Atoi(ids[1])
	if err != nil {
		return -1
	}
	return gid
}

// field is a value in a status file of proc(5).
func field(file, name string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if value, ok := strings.CutPrefix(line, name); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// statFields are the fields of a stat file from the third on: what comes
// before may hold anything.
func statFields(file string) ([]string, bool) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, false
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	return f, len(f) >= 20
}

func readProcess(pid int) (process, bool) {
	f, ok := statFields(procfs.Path(pid, "stat"))
	if !ok {
		return process{}, false
	}
	ppid, err1 := strconv.Atoi(f[1])
	session, err2 := strconv.Atoi(f[3])
	threads, err3 := strconv.Atoi(f[17])
	return process{ident{pid, f[19]}, ppid, session, f[0][0], threads}, errors.Join(err1, err2, err3) == nil
}

// send signals this very process: FindProcess pins it (pidfd), so that what is
// checked afterwards is what is signalled.
func send(id ident, sig syscall.Signal) bool {
	p, err := os.FindProcess(id.pid)
	if err != nil {
		return false
	}
	defer p.Release()
	now, ok := readProcess(id.pid)
	return ok && now.ident == id && p.Signal(sig) == nil
}
