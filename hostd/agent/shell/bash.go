package shell

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/berth-dev/berth/hostd/agent/account"
	"github.com/berth-dev/berth/hostd/agent/freeze"
)

// startLimit bounds a bash's start: it has seconds on a loaded machine, and a
// shell that needs longer is broken.
const startLimit = 20 * time.Second

// bash is one persistent shell process. The holder of its lane's turn owns all
// fields but those that goroutines of their own set before closing a channel.
type bash struct {
	mark    string     // 16 hex digits, unique to this process
	dir     string     // root's folder with the driver files and pipes
	files   sync.Mutex // held to make files in dir, and to remove it: between the two, what is made would keep it
	cmd     *exec.Cmd
	feed    *os.File    // what bash reads
	reports chan report // from the status pipe
	dead    chan struct{}
	exit    int           // set before dead closes
	begun   atomic.Uint64 // the newest command that bash said it begins; final once dead closes
	ending  sync.Once

	status int                  // exit code of the last command: the next one's $?
	lastBg string               // newest background job bash told of
	jobs   map[ident]bool       // processes that earlier commands left running
	env    atomic.Pointer[vars] // the version its variables are of
}

type report struct {
	id     uint64
	status int
	bg     string
}

// startBash starts a shell, as saved if that is not nil, and waits until it has
// read its prologue.
func startBash(ctx context.Context, s *Shells, saved *Saved) (_ *bash, err error) {
	b := &bash{mark: newMark(), reports: make(chan report, 16), dead: make(chan struct{})}
	b.env.Store(s.sessionEnv())
	if saved != nil && saved.Env != nil {
		b.env.Store(&vars{s.sessionEnv().m, saved.Proxied})
	}
	b.dir = s.folder(b.mark)
	if err := os.Mkdir(b.dir, 0o711); err != nil {
		return nil, fmt.Errorf("start bash: %w", err)
	}
	pipe, err := b.launch(ctx, s, saved)
	if err != nil {
		os.RemoveAll(b.dir)
		return nil, fmt.Errorf("start bash: %w", err)
	}
	heard := make(chan struct{})
	s.tails.Go(func() { defer close(heard); b.listen(pipe) })
	s.tails.Go(func() { b.wait(pipe, heard) })
	if err := b.greet(ctx, s); err != nil {
		b.end()
		return nil, fmt.Errorf("start bash: %w", err)
	}
	return b, nil
}

// launch makes the folder's content and the process; it returns the status
// pipe's read end.
func (b *bash) launch(ctx context.Context, s *Shells, saved *Saved) (*os.File, error) {
	if err := writeDriver(b.dir); err != nil {
		return nil, err
	}
	path := filepath.Join(b.dir, "s")
	if err := makeFIFO(path, s.cfg.Account); err != nil {
		return nil, err
	}
	// Both ways, so that it never ends while bash closes it between reports.
	status, err := os.OpenFile(path, os.O_RDWR|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	in, feed, err := os.Pipe()
	if err != nil {
		status.Close()
		return nil, err
	}
	defer in.Close()
	b.feed = feed
	b.cmd = s.command(bashArgs, b.env.Load().all(), b.commandMark(0))
	b.cmd.Stdin = in
	if saved != nil {
		saved.apply(b.cmd, b.commandMark(0))
	}
	if err := s.start(ctx, b.cmd); err != nil {
		status.Close()
		feed.Close()
		return nil, err
	}
	return status, nil
}

// command is bash as the account, in a session of its own, in the workspace.
func (s *Shells) command(args []string, env map[string]string, mark string) *exec.Cmd {
	cmd := exec.Command("/bin/bash", args...)
	cmd.Args[0] = "bash"
	cmd.Dir = s.cfg.Workspace.Dir
	cmd.Env = append(s.cfg.Account.Env("dumb"), "PWD="+s.cfg.Workspace.Dir)
	for _, k := range sorted(env) {
		cmd.Env = append(cmd.Env, k+"="+env[k])
	}
	cmd.Env = append(cmd.Env, markVar+"="+mark)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: s.cfg.Account.Credential()}
	return cmd
}

// start starts a command once the customer's processes need not stand still.
func (s *Shells) start(ctx context.Context, cmd *exec.Cmd) error {
	leave, err := s.cfg.Freezer.Enter(ctx, freeze.Customer)
	if err != nil {
		return err
	}
	defer leave()
	return s.cfg.Freezer.Start(freeze.Customer, cmd)
}

// greet feeds the prologue and waits for the first report.
func (b *bash) greet(ctx context.Context, s *Shells) error {
	ctx, cancel := s.cfg.Freezer.WithTimeout(ctx, freeze.Customer, startLimit, context.DeadlineExceeded)
	defer cancel()
	if _, err := b.feed.WriteString(prologue + b.reportLine(0)); err != nil {
		return err
	}
	select {
	case <-b.reports:
		return nil
	case <-b.dead:
		return fmt.Errorf("bash ended with exit code %d", b.exit)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// listen hears the lines of the status pipe until its read deadline, set at
// bash's end, and then what is left in it.
func (b *bash) listen(pipe *os.File) {
	b.hear(pipe)
	var left bytes.Buffer
	drain(pipe, &left, make([]byte, 4<<10))
	b.hear(&left)
}

// hear turns lines into reports, and "bID" lines into what has begun.
// A customer's program could write there too: it fools only its own session,
// and what is malformed or too much is dropped.
func (b *bash) hear(from io.Reader) {
	lines := bufio.NewReaderSize(from, 512)
	for {
		line, err := lines.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if err != nil {
			return
		}
		if line[0] == 'b' {
			if id, err := strconv.ParseUint(string(line[1:len(line)-1]), 10, 64); err == nil {
				b.begun.Store(id)
			}
			continue
		}
		var r report
		if _, err := fmt.Sscanf(string(line), "%d %d %s", &r.id, &r.status, &r.bg); err != nil {
			continue
		}
		select {
		case b.reports <- r:
		default:
		}
	}
}

// wait sees the process end, lets listen take in all that bash had said before
// and lets go of what served it.
func (b *bash) wait(pipe *os.File, heard <-chan struct{}) {
	b.exit = exitCode(b.cmd.Wait(), b.cmd.ProcessState)
	_ = pipe.SetReadDeadline(past)
	<-heard
	pipe.Close()
	b.feed.Close()
	b.removeDir()
	close(b.dead)
}

// removeDir removes the folder; who makes a file in it later gets fs.ErrNotExist.
func (b *bash) removeDir() {
	b.files.Lock()
	defer b.files.Unlock()
	os.RemoveAll(b.dir)
}

func (b *bash) alive() bool {
	select {
	case <-b.dead:
		return false
	default:
		return true
	}
}

// end kills bash and everything it started, and returns when bash is gone.
func (b *bash) end() {
	b.ending.Do(func() {
		killTree(b.cmd.Process, b.mark)
		<-b.dead
	})
	<-b.dead
}

func (b *bash) commandMark(id uint64) string { return fmt.Sprintf("%s-%d", b.mark, id) }

func newMark() string {
	m := make([]byte, 8)
	_, _ = rand.Read(m) // never fails since Go 1.24
	return hex.EncodeToString(m)
}

// exitCode is what a shell would show for a process: its code, or 128 and the
// signal.
func exitCode(err error, state *os.ProcessState) int {
	if state == nil { // Wait itself failed: somebody else reaped it
		return 255
	}
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	_ = err // says the same as state
	return state.ExitCode()
}

// makeFIFO makes a named pipe for the account in a folder that only root
// changes, so that nobody can put another file under its name.
func makeFIFO(path string, who account.Account) error {
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		return &os.PathError{Op: "mkfifo", Path: path, Err: err}
	}
	return who.Owns(func(uid, gid int) error { return os.Lchown(path, uid, gid) })
}

// tooLong reports whether text needs more room than the feed's pipe surely has.
func tooLong(text string) bool { return len(text) > 32<<10 }

// write feeds text. A long one waits for bash to read, which it may never do:
// the rest then ends with bash.
func (b *bash) write(s *Shells, text string) error {
	if tooLong(text) {
		s.tails.Go(func() { _, _ = strings.NewReader(text).WriteTo(b.feed) })
		return nil
	}
	_, err := b.feed.WriteString(text)
	return err
}
