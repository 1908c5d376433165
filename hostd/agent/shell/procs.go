package shell

import (
	"bytes"
	"math"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/agent/procfs"
)

// ident names a process for good: its number comes again, with its start time
// it does not.
type ident struct {
	pid   int
	start uint64 // clock ticks since boot, /proc/PID/stat field 22
}

type process struct {
	ident
	ppid int
	mark string // value of markVar in the environment it was exec'ed with
	dead bool   // a zombie
}

// target says which processes are meant: all that a shell ever started, or
// those of one command in it.
type target struct {
	shell   string         // the shell's mark
	command string         // "" for all of the shell
	bash    int            // the shell's first process, never a target itself
	since   uint64         // ticks: when the command started
	spare   map[ident]bool // left running by earlier commands
}

// ticks is the present in the unit of ident.start. USER_HZ is 100 on every
// Linux that Go runs on.
func ticks() uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0 // then nothing counts as older than the command
	}
	return uint64(ts.Nano() / (int64(time.Second) / 100))
}

// choose picks the target's processes out of all.
//
// A mark decides where there is one: a subshell that bash forked without exec
// shows bash's own, "<shell>-0", and then age and spare decide. A process
// without mark (env -i, sudo) follows its nearest ancestor that is chosen or
// is bash.
func (t target) choose(all []process) []process {
	byPID := make(map[int]*process, len(all))
	for i := range all {
		byPID[all[i].pid] = &all[i]
	}
	verdicts := make(map[int]bool, len(all))
	var chosen func(p *process, depth int) bool
	chosen = func(p *process, depth int) bool {
		if v, ok := verdicts[p.pid]; ok {
			return v
		}
		v := false
		if p.pid != t.bash && depth < math.MaxInt16 { // a scan is no snapshot: parents may seem to form a ring
			verdicts[p.pid] = false
			v = t.marked(p)
			if parent := byPID[p.ppid]; !v && parent != nil && !strings.HasPrefix(p.mark, t.shell+"-") {
				v = chosen(parent, depth+1) || p.ppid == t.bash && t.fresh(p)
			}
		}
		verdicts[p.pid] = v
		return v
	}
	var out []process
	for i := range all {
		if !all[i].dead && chosen(&all[i], 0) {
			out = append(out, all[i])
		}
	}
	return out
}

func (t target) marked(p *process) bool {
	switch {
	case t.command == "":
		return strings.HasPrefix(p.mark, t.shell+"-")
	case p.mark == t.command:
		return true
	}
	return p.mark == t.shell+"-0" && t.fresh(p)
}

func (t target) fresh(p *process) bool { return p.start >= t.since && !t.spare[p.ident] }

// killUntilGone kills the target's processes again and again until none is
// left, since they may fork meanwhile, or the deadline passes. What outlives
// two rounds is a fork bomb, which is only ended by stopping all of it first.
func killUntilGone(t target, deadline time.Time) {
	for round := 0; ; round++ {
		victims := t.choose(processes())
		if len(victims) == 0 || (round > 0 && time.Now().After(deadline)) {
			return
		}
		if round >= 2 {
			victims = stopAll(t, victims, deadline)
		}
		for _, p := range victims {
			send(p.ident, syscall.SIGKILL)
		}
	}
}

// stopAll stops victims and whatever they forked until a look finds nothing
// new: the stopped ones fork no more. It returns all of them.
func stopAll(t target, victims []process, deadline time.Time) []process {
	stopped := make(map[ident]bool)
	for {
		fresh := false
		for _, p := range victims {
			if !stopped[p.ident] {
				send(p.ident, syscall.SIGSTOP)
				stopped[p.ident], fresh = true, true
			}
		}
		if !fresh || time.Now().After(deadline) {
			return victims
		}
		victims = t.choose(processes())
	}
}

// treeGrace bounds the end of a whole tree: thousands of processes, when it is
// a fork bomb, on one busy processor.
const treeGrace = 10 * time.Second

// killTree kills root and everything it started, all of which carries the mark
// or descends from it. root goes last, held still meanwhile: its unmarked
// children are known by it.
func killTree(root *os.Process, mark string) {
	_ = root.Signal(syscall.SIGSTOP)
	killUntilGone(target{shell: mark, bash: root.Pid}, time.Now().Add(treeGrace))
	_ = root.Kill()
}

// send signals this very process. FindProcess pins it (pidfd), so that what is
// checked afterwards is what is signalled.
func send(id ident, sig syscall.Signal) {
	p, err := os.FindProcess(id.pid)
	if err != nil {
		return
	}
	defer p.Release()
	if now, ok := readStat(id.pid); ok && now.ident == id {
		_ = p.Signal(sig) // gone meanwhile is as good
	}
}

// processes lists what runs in the machine but this process.
func processes() []process {
	var all []process
	for _, pid := range procfs.PIDs() {
		if p, ok := readStat(pid); ok {
			procfs.AsOwner(pid, func() { p.mark = readMark(pid) })
			all = append(all, p)
		}
	}
	return all
}

// readStat parses /proc/PID/stat (proc(5)); the name in it may hold anything,
// so what counts begins after its last parenthesis.
func readStat(pid int) (process, bool) {
	b, err := os.ReadFile(procfs.Path(pid, "stat"))
	if err != nil {
		return process{}, false
	}
	return parseStat(pid, b)
}

func parseStat(pid int, b []byte) (process, bool) {
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 20 {
		return process{}, false
	}
	ppid, err1 := strconv.Atoi(f[1])
	start, err2 := strconv.ParseUint(f[19], 10, 64)
	if err1 != nil || err2 != nil {
		return process{}, false
	}
	return process{ident: ident{pid, start}, ppid: ppid, dead: f[0] == "Z" || f[0] == "X"}, true
}

func readMark(pid int) string {
	b, err := os.ReadFile(procfs.Path(pid, "environ"))
	if err != nil {
		return ""
	}
	b = append([]byte{0}, b...)
	_, after, ok := bytes.Cut(b, []byte("\x00"+markVar+"="))
	if !ok {
		return ""
	}
	value, _, _ := bytes.Cut(after, []byte{0})
	return string(value)
}
