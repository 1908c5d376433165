package browser

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/hostd/agent/freeze"
)

// errNoSandbox: this kernel or container does not let Chrome make the user
// namespace its own sandbox is built from.
var errNoSandbox = errors.New("chrome found no usable sandbox")

// process is a launched Chrome: a session of its own (setsid), so that the
// children that outlive a killed browser process can be found.
type process struct {
	cmd    *exec.Cmd
	gid    int           // 0: not to be searched for
	exited chan struct{} // closed once err is set
	err    error
}

// launch starts Chrome and waits for the address of its DevTools server, which
// it prints on stderr: "DevTools listening on ws://127.0.0.1:PORT/devtools/browser/ID".
func launch(ctx context.Context, cfg Config, args []string, log *slog.Logger) (*process, string, error) {
	cmd := command(cfg, args)
	stderr, w, err := os.Pipe()
	if err != nil {
		return nil, "", fmt.Errorf("launch: %w", err)
	}
	cmd.Stderr = w
	err = cfg.start(ctx, cmd)
	_ = w.Close()
	if err != nil {
		_ = stderr.Close()
		return nil, "", fmt.Errorf("launch: %w", err)
	}
	p := &process{cmd: cmd, exited: make(chan struct{})}
	if cfg.UID != 0 {
		p.gid = cfg.GID
	}
	lines := make(chan string, 1)
	go readStderr(stderr, lines, log)
	go func() {
		p.err = cmd.Wait()
		close(p.exited)
	}()
	select {
	case line := <-lines:
		if strings.HasPrefix(line, "ws://") {
			return p, line, nil
		}
		p.kill()
		return nil, "", fmt.Errorf("launch: %w: %s", errNoSandbox, line)
	case <-p.exited:
		select { // the reason may have been printed just before
		case line := <-lines:
			err = fmt.Errorf("launch: %w: %s", errNoSandbox, line)
		case <-time.After(time.Second):
			err = fmt.Errorf("launch: chrome ended at once: %w", errors.Join(p.err, errEnded))
		}
		p.kill()
		return nil, "", err
	case <-ctx.Done():
		p.kill()
		return nil, "", fmt.Errorf("launch: %w", context.Cause(ctx))
	}
}

// start starts Chrome once it need not stand still.
func (c Config) start(ctx context.Context, cmd *exec.Cmd) error {
	leave, err := c.Freezer.Enter(ctx, freeze.Browser)
	if err != nil {
		return err
	}
	defer leave()
	return c.Freezer.Start(freeze.Browser, cmd)
}

var errEnded = errors.New("process ended")

func command(cfg Config, args []string) *exec.Cmd {
	cmd := exec.Command(cfg.Binary, args...)
	if cfg.UID != 0 {
		// setpriv execs, so the pid is Chrome's. Go's Credential cannot set
		// no_new_privs, without which a page that broke out could use sudo.
		groups := make([]string, len(cfg.Groups))
		for i, g := range cfg.Groups {
			groups[i] = strconv.Itoa(g)
		}
		supplementary := []string{"--clear-groups"}
		if len(groups) > 0 {
			supplementary = []string{"--groups", strings.Join(groups, ",")}
		}
		full := append([]string{"--reuid", strconv.Itoa(cfg.UID), "--regid", strconv.Itoa(cfg.GID)}, supplementary...)
		full = append(full, "--no-new-privs", "--inh-caps=-all", "--", cfg.Binary)
		cmd = exec.Command("setpriv", append(full, args...)...)
	}
	cmd.Env = cfg.env()
	cmd.Dir = cfg.Home
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

// readStderr drains Chrome's stderr for all its life; it hands on the first
// line that tells the address or that there is no sandbox to be had.
func readStderr(r io.ReadCloser, found chan<- string, log *slog.Logger) {
	defer r.Close()
	told := false
	lines := bufio.NewReaderSize(r, 4096)
	for {
		raw, err := lines.ReadSlice('\n') // a longer line comes in parts
		line := string(bytes.TrimSpace(raw))
		if _, url, ok := strings.Cut(line, "DevTools listening on "); ok && !told {
			told = true
			found <- url
		} else if !told && (strings.Contains(line, "No usable sandbox") || strings.Contains(line, "without --no-sandbox")) {
			told = true
			found <- line
		} else if line != "" {
			log.Debug("chrome says", "line", line)
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

// kill ends Chrome and every process it left, and returns when the first one
// has been reaped.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.exited
	// A child that forks while we look is found by the next look.
	for range 10 {
		if !killSession(p.cmd.Process.Pid, p.gid) {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// killSession kills the living members of a session (setsid), and, inside a
// machine, whatever else has Chrome's own group.
func killSession(sid, gid int) (any bool) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil || pid == os.Getpid() {
			continue
		}
		if ours(dir, sid, gid) && syscall.Kill(pid, syscall.SIGKILL) == nil {
			any = true
		}
	}
	return any
}

func ours(dir string, sid, gid int) bool {
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return false
	}
	// proc(5): after the command in parentheses come state, ppid, pgrp, session.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 4 || fields[0] == "Z" || fields[0] == "X" {
		return false
	}
	if fields[3] == strconv.Itoa(sid) {
		return true
	}
	if gid == 0 || os.Getppid() != 1 {
		return false // no child of a machine's init: others may run a Chrome here
	}
	var st syscall.Stat_t
	return syscall.Stat(dir, &st) == nil && int(st.Gid) == gid
}
