package microvm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine/cgroup"
)

// A template's memory is a file without a name (memfd), sealed against writing
// and resizing. A small process in a cgroup of its own has filled it and holds
// it: the memory is on that cgroup's account, outlives hostd, and nobody who
// maps it can alter, cut or evict it.
const (
	holderName = "berth-template"
	holderFD   = 3
	allSeals   = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	// holderPrefix is of the groups' names; no machine id has it.
	holderPrefix = "template-"
)

// load says what the process that becomes a holder fills its memory with.
type load struct {
	Procs []string `json:"procs"` // files of the cgroup to enter
	File  string   `json:"file"`
	Want  part     `json:"want"`
}

func init() {
	if len(os.Args) == 0 || os.Args[0] != holderName {
		return
	}
	var l load
	err := json.NewDecoder(os.Stdin).Decode(&l)
	if err == nil {
		err = l.fill(os.NewFile(holderFD, ramName))
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ok")
	// The smallest program that waits. It keeps descriptor 3.
	err = syscall.Exec("/usr/bin/sleep", []string{holderName, "infinity"}, nil)
	fmt.Println(err)
	os.Exit(1)
}

// fill copies the file into the memory, if it is the wanted one, and seals it.
func (l load) fill(memory *os.File) error {
	if err := enter(l.Procs); err != nil {
		return err
	}
	f, err := os.Open(l.File)
	if err != nil {
		return err
	}
	defer f.Close()
	got, err := copyBlocks(memory, f)
	if err != nil {
		return err
	}
	if got != l.Want {
		return fmt.Errorf("memory is damaged: hash %.12s, want %.12s", got.Hash, l.Want.Hash)
	}
	if _, err := unix.FcntlInt(memory.Fd(), unix.F_ADD_SEALS, allSeals); err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	_, err = unix.FcntlInt(holderFD, unix.F_SETFD, 0) // keep it over exec
	return err
}

// holder is a template's memory, open for reading, and who holds it where that
// is this process's child.
type holder struct {
	ram     *os.File
	process *cgroup.Process // nil: of an earlier hostd
}

func (h holder) close() error {
	var err error
	if h.ram != nil {
		err = h.ram.Close()
	}
	if h.process != nil {
		err = errors.Join(err, h.process.Close())
	}
	return err
}

// reap collects a holder that has been ended, and closes.
func (h holder) reap() error {
	if h.process != nil && h.process.Wait() {
		h.process.Reap()
	}
	return h.close()
}

// hold finds the process that holds a template's memory, or starts one.
func (d *Driver) hold(ctx context.Context, hash string, want part) (holder, error) {
	group := d.holderGroup(hash)
	if f := d.heldRAM(group, want.Size); f != nil {
		return holder{ram: f}, nil
	}
	if err := d.dropGroup(ctx, group); err != nil { // of a holder that died
		return holder{}, err
	}
	if err := d.groups.Make(group, cgroup.Limits{Pids: 64}); err != nil {
		return holder{}, err
	}
	h, err := d.startHolder(ctx, group, load{File: d.store.path(hash, "ram"), Want: want, Procs: d.groups.Procs(group)})
	if err != nil {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		defer cancel()
		return holder{}, errors.Join(err, d.dropGroup(clean, group))
	}
	return h, nil
}

// heldRAM looks for a holder that is there: the process in the group, whose
// descriptor is sealed memory of the right size. What is sealed was checked.
func (d *Driver) heldRAM(group string, size int64) *os.File {
	pids, err := d.groups.Pids(group)
	if err != nil || len(pids) != 1 {
		return nil
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/fd/%d", pids[0], holderFD))
	if err != nil {
		return nil
	}
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	info, err2 := f.Stat()
	if err != nil || err2 != nil || seals != allSeals || info.Size() != size {
		f.Close()
		return nil
	}
	return f
}

func (d *Driver) startHolder(ctx context.Context, group string, l load) (holder, error) {
	fd, err := unix.MemfdCreate(ramName, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return holder{}, fmt.Errorf("memory: %w", err)
	}
	memory := os.NewFile(uintptr(fd), ramName)
	defer memory.Close()
	config, err := json.Marshal(l)
	if err != nil {
		return holder{}, err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return holder{}, err
	}
	defer read.Close()
	pidfd := -1
	cmd := &exec.Cmd{Path: "/proc/self/exe", Args: []string{holderName}, Env: []string{}, Dir: "/", Stdout: write,
		ExtraFiles: []*os.File{memory}, SysProcAttr: &syscall.SysProcAttr{Setsid: true, PidFD: &pidfd}}
	p, err := start(cmd, config, &pidfd)
	write.Close()
	if err != nil {
		return holder{}, err
	}
	h := holder{process: p}
	if err = loaded(ctx, p, read); err == nil {
		h.ram, err = os.Open(fmt.Sprintf("/proc/self/fd/%d", memory.Fd()))
	}
	if err != nil {
		return holder{}, errors.Join(err, end(p))
	}
	return h, nil
}

// loaded waits for the loader's one line. What follows on the pipe is nothing,
// and no end: the process keeps it.
func loaded(ctx context.Context, p *cgroup.Process, says io.Reader) error {
	defer context.AfterFunc(ctx, func() { _ = p.Kill() })()
	line := make([]byte, 4096)
	n, err := says.Read(line)
	text := strings.TrimSpace(string(line[:n]))
	switch {
	case text == "ok":
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case text != "":
		return fmt.Errorf("load template: %s", text)
	}
	return fmt.Errorf("load template: its loader died: %w", err)
}

func (d *Driver) holderGroup(hash string) string { return d.group(holderPrefix + hash) }

func (d *Driver) dropGroup(ctx context.Context, group string) error {
	if err := d.groups.Kill(ctx, group); err != nil {
		return err
	}
	return d.groups.Rmdir(ctx, group)
}

// dropHolders ends the holders of templates that are not in use.
func (d *Driver) dropHolders(ctx context.Context, used map[string]bool) error {
	leave, err := d.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	var errs []error
	for _, name := range d.groups.Children(d.cfg.Cgroup) {
		hash, ok := strings.CutPrefix(filepath.Base(name), holderPrefix)
		if !ok || used[hash] {
			continue
		}
		d.mu.Lock()
		t := d.templates[hash]
		delete(d.templates, hash)
		d.mu.Unlock()
		errs = append(errs, d.dropGroup(ctx, d.holderGroup(hash)))
		if t != nil {
			errs = append(errs, t.files(), t.holder.reap())
		}
	}
	return errors.Join(errs...)
}
