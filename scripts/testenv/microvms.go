package testenv

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
)

// VM is a microVM's emulator.
type VM struct {
	PID    int
	Daemon string // the hostd that it belongs to
}

// VMs are the microVMs that run now on all hosts of the stack: those of
// sessions, of pools, and those that become templates.
func (e *Env) VMs() []VM {
	var out []VM
	for _, pid := range pids() {
		line, _ := os.ReadFile(procPath(pid, "cmdline"))
		if name, _, _ := bytes.Cut(line, []byte{0}); string(name) != "qemu" {
			continue
		}
		if host := e.hostOf(pid); host != "" {
			out = append(out, VM{pid, host})
		}
	}
	return out
}

// SnapshotBytes is what the snapshots of a host take on its disk.
func (e *Env) SnapshotBytes(daemon string) (n int64) {
	_ = filepath.WalkDir(filepath.Join(e.Home, daemon, "snapshots"), func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil // files come and go
		}
		if info, err := d.Info(); err == nil {
			n += info.Size()
		}
		return nil
	})
	return n
}
